"""What the trackers for TensorBoard, W&B and MLflow have in common: which metrics, rollouts and files they send, and
the name of the remote run that a resumed run continues."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from toolwise.errors import ConfigError
from toolwise.protocols import Callback, Tracker
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text
from toolwise.training.records import RolloutRecord
from toolwise.training.trackers.conversation import clean_text, conversation_turns
from toolwise.types import EndEvent, RunStart, ScoredRollout, StepEvent, ValidationEvent

STATE_FILE = "trackers.json"
"""In the run folder: the identifiers of the runs that trackers continue after a resume."""
MAX_CONVERSATION_CHARS = 4000


class RolloutRow(NamedTuple):
    """A rollout in a table."""

    step: int
    rollout_id: str
    task_id: str
    kind: str
    route: str
    score: float | None
    cost: float | None
    stop_reason: str
    calls: int
    tokens: int
    conversation: str


class Dashboard(Tracker, Callback):
    """Sends a run's metrics, settings, some rollouts and the report to a dashboard. If it cannot be opened, nothing is
    sent and the run goes on."""

    package: ClassVar[str]
    """Imported only when the tracker is used; the extra has the same name."""

    def __init__(self, rollouts: int = 16, every: int = 10) -> None:
        """`rollouts`: rows of each table, of every `every`-th step and of every validation; 0: no tables."""
        if rollouts < 0 or every < 1:
            raise ConfigError(f"rollouts must be 0 or more and every 1 or more, got {rollouts} and {every}")
        self.rollouts, self.every = rollouts, every
        self._folder: Path | None = None
        """Set once the dashboard is open."""
        self._ended = False

    def start(self, run: RunStart) -> None:
        self.open(run)
        self._folder = run.run_folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Values that are not finite are left out: metrics.jsonl has null for them."""
        finite = {name: float(v) for name, v in metrics.items() if v is not None and math.isfinite(v)}
        if self._folder is not None and finite:
            self.send_metrics(step, finite)

    def on_step(self, event: StepEvent) -> None:
        if event.step % self.every == 0:
            self._send_table("rollouts/train", event.step, event.rollouts)

    def on_validation(self, event: ValidationEvent) -> None:
        self._send_table("rollouts/eval", event.step, event.rollouts)

    def on_end(self, event: EndEvent) -> None:
        self._ended = True

    def close(self) -> None:
        """The report is written after `on_end`. An older one, of a run that ends without, is not sent."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        try:
            if self._ended and (folder / "report.html").exists():
                self.send_report(folder)
        finally:
            self.finish()

    def _send_table(self, name: str, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        if self._folder is not None and self.rollouts and rollouts:
            self.send_table(name, step, [rollout_row(step, scored) for scored in spread(rollouts, self.rollouts)])

    @abstractmethod
    def open(self, run: RunStart) -> None:
        """Begin a run, or continue that of the run folder, with the run's settings."""

    @abstractmethod
    def send_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    @abstractmethod
    def send_table(self, name: str, step: int, rows: Sequence[RolloutRow]) -> None: ...

    @abstractmethod
    def send_report(self, folder: Path) -> None:
        """Send report.html, and summary.json beside it."""

    @abstractmethod
    def finish(self) -> None:
        """Send what is left, and close."""


def spread(rollouts: Sequence[ScoredRollout], count: int) -> list[ScoredRollout]:
    """At most `count` of them, evenly spread: rollouts of many tasks, not all of the first."""
    count = min(count, len(rollouts))
    return [rollouts[index * len(rollouts) // count] for index in range(count)]


def rollout_row(step: int, scored: ScoredRollout) -> RolloutRow:
    record = RolloutRecord.of(scored)
    turns = (f"{turn.kind}{f' {turn.name}' if turn.name else ''}: {turn.text}" for turn in _turns(record))
    return RolloutRow(
        step,
        record.rollout_id,
        record.task_id,
        "" if record.kind is None else clean_text(record.kind),
        record.route or "",
        record.score,
        record.cost,
        record.stop_reason,
        sum(record.calls.values()),
        sum(part.tokens for part in record.steps),
        "\n".join(turns)[:MAX_CONVERSATION_CHARS],
    )


def _turns(record: RolloutRecord) -> Any:
    return conversation_turns(record.messages)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as `actor.lr`: 1e-6; lists stay as they are, and what is unset is left out."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def read_identifier(folder: Path, tracker: str) -> str | None:
    """The run that a tracker of an earlier process began; None if there is none, or the file is damaged."""
    file = folder / STATE_FILE
    try:
        stored = json.loads(file.read_bytes()) if file.exists() else {}
    except (ValueError, RecursionError):
        return None
    identifier = stored.get(tracker) if isinstance(stored, dict) else None
    return identifier if isinstance(identifier, str) else None


def write_identifier(folder: Path, tracker: str, identifier: str) -> None:
    file = folder / STATE_FILE
    try:
        stored = json.loads(file.read_bytes()) if file.exists() else {}
    except (ValueError, RecursionError):
        stored = {}
    stored = stored if isinstance(stored, dict) else {}
    write_atomic(file, json_text({**stored, tracker: identifier}, indent=2).encode())
