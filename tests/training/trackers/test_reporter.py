"""What a run tells its trackers and callbacks, and what one of them may stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.config.trainer import TrainerConfig
from toolwise.training.trackers.observers import ContainedObserver, Observers
from toolwise.training.trackers.reporter import Reporter
from toolwise.types.findings import Finding

QUIET = TrainerConfig(console=False)


class Records(toolwise.Callback):
    def __init__(self, stop: str = "") -> None:
        self.stop, self.events = stop, []

    def on_step(self, event: toolwise.StepEvent) -> toolwise.Stop | None:
        self.events.append(event.step)
        return toolwise.Stop(self.stop) if self.stop else None

    def on_end(self, event: toolwise.EndEvent) -> None:
        self.events.append(event.summary)
        event.summary["name"] = "changed"


def step(out: Path, number: int = 1) -> Any:
    return toolwise.StepEvent(out, number, {"a": 1.0}, (), ())


def test_the_first_stop_gives_the_reason_and_all_are_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second, mine = Records("good\nenough"), Records("late"), Records()
    observers = Observers(callbacks=[ContainedObserver(second, "callback mine.py:Second")])
    reporter = Reporter(tmp_path, QUIET, observers, name="run", total_steps=3, first=[first], last=[mine])
    reporter.notify("on_step", step(tmp_path), unfinished=True)
    assert reporter.stop_reason == "Records: good enough"
    assert "Records: good enough; finishing this step and saving" in caplog.text
    assert (first.events, second.events, mine.events) == ([1], [1], [1])


def test_nothing_stops_a_run_that_is_done(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, QUIET, name="run", total_steps=1, last=[Records("enough")])
    reporter.notify("on_step", step(tmp_path), unfinished=False)
    assert reporter.stop_reason is None


def test_metrics_and_the_summary_are_written_and_callbacks_get_a_copy(tmp_path: Path) -> None:
    mine = Records()
    reporter = Reporter(tmp_path, QUIET, name="run", total_steps=1, last=[mine])
    reporter.log(1, {"score/mean": 0.5})
    reporter.close()
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "score/mean": 0.5}
    summary = reporter.summarize(1, {}, {"name": "run"})
    assert summary == json.loads((tmp_path / "summary.json").read_bytes()) == {"name": "run", "observers": []}
    assert mine.events == [{"name": "changed", "observers": []}]


def test_without_a_console_findings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(tmp_path, QUIET, name="run", total_steps=1)
    reporter.warn([Finding("constant_reward", "warning", "All are equal", cure="Change it", step=1)])
    assert "All are equal" in caplog.text
    reporter.announce("")
