"""What the trackers that come with Toolwise share: which rollouts, settings and identifiers they send, and when."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.trainer import TrainerConfig
from toolwise.errors import ConfigError, MissingExtraError
from toolwise.messages import Message
from toolwise.training.trackers import dashboard, observers
from toolwise.training.trackers.dashboard import Dashboard, RolloutRow
from toolwise.training.trackers.mlflow import metric_name
from toolwise.training.trackers.observers import Observers, load_observers
from toolwise.types import (
    EndEvent,
    EvaluateResult,
    Rollout,
    RunStart,
    ScoredRollout,
    StepEvent,
    StopReason,
    Task,
    Usage,
    ValidationEvent,
)


def scored_rollout(name: str) -> ScoredRollout:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    rollout = Rollout(name, "g", 0, 0, task, None, (), task.prompt, StopReason.ANSWERED, Usage())
    return ScoredRollout(rollout, EvaluateResult(score=1.0), ())


class Recorded(Dashboard):
    """Keeps what it would send."""

    package = "json"

    def __init__(self, rollouts: int = 2, every: int = 3) -> None:
        super().__init__(rollouts, every)
        self.sent: list[Any] = []

    def open(self, run: RunStart) -> None:
        self.sent.append(("open", run.name))

    def send_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.sent.append((step, dict(metrics)))

    def send_table(self, name: str, step: int, rows: Sequence[RolloutRow]) -> None:
        self.sent.append((name, step, [row.rollout_id for row in rows]))

    def send_report(self, folder: Path) -> None:
        self.sent.append("report")

    def finish(self) -> None:
        self.sent.append("finish")


def start(folder: Path, step: int = 0) -> RunStart:
    return RunStart(folder, "named", step, 10, {"actor": {"lr": 1e-3}, "seed": None})


def test_it_sends_finite_metrics_and_some_rollouts_of_some_steps(tmp_path: Path) -> None:
    tracker = Recorded()
    rollouts = tuple(scored_rollout(f"r{index}") for index in range(6))
    tracker.start(start(tmp_path))
    tracker.log(1, {"score/mean": 0.5, "loss": math.nan})
    tracker.log(2, {"loss": math.inf})
    for step in (2, 3):
        tracker.on_step(StepEvent(tmp_path, step, {}, rollouts, ()))
    tracker.on_validation(ValidationEvent(tmp_path, 4, {}, rollouts))
    (tmp_path / "report.html").write_text("")
    tracker.on_end(EndEvent(tmp_path, 4, {}, {}))
    tracker.close()
    tracker.close()
    assert tracker.sent == [
        ("open", "named"),
        (1, {"score/mean": 0.5}),
        ("rollouts/train", 3, ["r0", "r3"]),
        ("rollouts/eval", 4, ["r0", "r3"]),
        "report",
        "finish",
    ]


def test_a_run_that_ends_without_a_summary_sends_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    tracker = Recorded()
    (tmp_path / "report.html").write_text("")
    tracker.start(start(tmp_path))
    tracker.close()
    assert tracker.sent == [("open", "named"), "finish"]


def test_one_that_could_not_be_opened_sends_nothing(tmp_path: Path) -> None:
    tracker = Recorded()
    tracker.log(1, {"a": 1.0})
    tracker.on_step(StepEvent(tmp_path, 3, {}, (scored_rollout("r"),), ()))
    tracker.close()
    assert tracker.sent == []


@pytest.mark.parametrize("options", [{"rollouts": -1}, {"every": 0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="rollouts must be 0 or more"):
        Recorded(**options)


def test_identifiers_survive_and_damaged_files_are_replaced(tmp_path: Path) -> None:
    assert dashboard.read_identifier(tmp_path, "wandb") is None
    dashboard.write_identifier(tmp_path, "wandb", "abc")
    dashboard.write_identifier(tmp_path, "mlflow", "123")
    assert dashboard.read_identifier(tmp_path, "wandb") == "abc"
    (tmp_path / dashboard.STATE_FILE).write_text("{")
    assert dashboard.read_identifier(tmp_path, "wandb") is None
    dashboard.write_identifier(tmp_path, "wandb", "new")
    assert json.loads((tmp_path / dashboard.STATE_FILE).read_bytes()) == {"wandb": "new"}


def test_settings_are_flat_and_without_what_is_unset() -> None:
    settings = {"actor": {"lr": 1e-3, "lora": None}, "tools": ["search"], "router": {}}
    assert dashboard.flatten(settings) == {"actor.lr": 1e-3, "tools": ["search"], "router": {}}


def test_mlflow_gets_names_that_it_allows() -> None:
    assert metric_name("router/cost@0.5/λ") == "router/cost_0.5/_"


def test_a_name_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"trainer.trackers: wandb is not installed: pip install 'toolwise\[wandb]'"
    ):
        load_observers(TrainerConfig(trackers=["wandb"]))


def test_a_misspelt_name_is_corrected() -> None:
    with pytest.raises(ConfigError, match="there is no tracker 'tensorbord'; did you mean 'tensorboard'"):
        load_observers(TrainerConfig(trackers=["tensorbord"]))


def test_an_unknown_option_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="has no option 'projekt'; did you mean 'project'"):
        load_observers(TrainerConfig(trackers=[{"name": "wandb", "kwargs": {"projekt": "x"}}]))


def test_it_is_told_of_rollouts_too_and_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(observers.TRACKERS, "json", f"{__name__}:Recorded")
    monkeypatch.setattr(observers, "load_reference", lambda *_, **__: Recorded)
    made = Observers()
    made.create(load_observers(TrainerConfig(trackers=["json"])))
    assert made.trackers == made.callbacks
    assert [entry["name"] for entry in made.to_json()] == ["tracker json"]
    made.trackers[0].on_step(StepEvent(tmp_path, 3, {}, (), ()))
    assert made.error_metrics() == {"faults/tracker": 0.0}
