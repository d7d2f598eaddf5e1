"""Rollouts that show a finding: a few ids from the stored rollouts of its last step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

from toolwise.errors import ToolwiseError
from toolwise.messages import as_messages
from toolwise.training.metrics import written_text
from toolwise.training.records import RolloutRecord, read_records
from toolwise.training.rollout_paths import rollout_file
from toolwise.types.findings import Finding

MAX_ROLLOUTS = 5
log = logging.getLogger("toolwise.training.diagnosis")

Choice = Callable[[Sequence[RolloutRecord]], list[RolloutRecord]]


def with_rollouts(finding: Finding, run_folder: Path) -> Finding:
    """The finding with the ids of rollouts to read; as it is if they are not stored."""
    steps = _steps(finding)
    path = rollout_file(run_folder / "rollouts", _file(steps)) if steps else None
    if finding.rollouts or path is None:
        return finding
    try:
        records = read_records(path)
    except (OSError, ToolwiseError) as fault:
        log.warning("no rollouts for the finding %s: %s", finding.name, fault)
        return finding
    chosen = CHOICES.get(finding.name, worst)(records)
    return replace(finding, rollouts=tuple(record.rollout_id for record in chosen[:MAX_ROLLOUTS]))


def pages(finding: Finding) -> list[str]:
    """Where `toolwise view RUN` shows the evidence, as its pages write it in their addresses: each of the rollouts,
    and all of the steps."""
    steps = _steps(finding)
    if not steps:
        return []
    shown = [{"run": 0, "file": _file(steps), "id": name} for name in finding.rollouts]
    table = {"run": 0, "phase": "train", "step_min": steps[0], "step_max": steps[-1]}
    return [*(f"#/rollout?{urlencode(one)}" for one in shown), f"#/rollouts?{urlencode(table)}"]


def _steps(finding: Finding) -> tuple[int, ...]:
    return finding.steps or ((finding.step, finding.step) if finding.step else ())


def _file(steps: Sequence[int]) -> str:
    """The rollouts of a finding are those of its last step."""
    return f"step-{steps[-1]:06d}"


def worst(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    return sorted((r for r in records if r.score is not None), key=_score)


def paid_for_nothing(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """The best scores of answers that are not correct."""
    wrong = [r for r in records if r.correct is False and r.score is not None]
    return sorted(wrong, key=_score, reverse=True)


def longest(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    return sorted(records, key=_tokens, reverse=True)


def most_common(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """One for each task that got the most frequent output."""
    texts = [written_text(as_messages(r.messages)) for r in records]
    common = Counter(texts).most_common(1)[0][0] if texts else ""
    return list({r.task_id: r for r, text in zip(records, texts, strict=True) if text == common}.values())


def failed_calls(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    return sorted((r for r in records if r.failed_calls), key=lambda r: -sum(r.failed_calls.values()))


def failed_calls_or_worst(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    return failed_calls(records) or worst(records)


def faulty(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    return [r for r in records if r.fault]


def most_expensive(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    return sorted(records, key=lambda r: -(r.cost or 0.0))


def _score(record: RolloutRecord) -> float:
    return record.score or 0.0


def _tokens(record: RolloutRecord) -> int:
    return sum(step.tokens for step in record.steps)


CHOICES: dict[str, Choice] = {
    "reward_hacking": paid_for_nothing,
    "length_creep": longest,
    "truncation": longest,
    "replies_cut": longest,
    "identical_outputs": most_common,
    "tool_failures": failed_calls,
    "tool_failed": failed_calls,
    "weights_unchanged": failed_calls_or_worst,
    "episodes_failed": faulty,
    "route_failed": faulty,
    "prompt_too_long": faulty,
    "budget_missed": most_expensive,
    "starvation": lambda records: [],
    "canary_drift": longest,
}
