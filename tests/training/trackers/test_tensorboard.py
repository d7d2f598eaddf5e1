"""TensorBoard's event files, written and read with its own package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolwise.training.trackers.dashboard import RolloutRow
from toolwise.training.trackers.tensorboard import TensorBoardTracker, markdown_table
from toolwise.types import EndEvent, RunStart

pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'toolwise[tensorboard]'")


def track(folder: Path, first: int, last: int, shift: float = 0.0) -> None:
    tracker = TensorBoardTracker()
    tracker.start(RunStart(folder, "named", first - 1, 10, {"actor": {"lr": 1e-3}}))
    for step in range(first, last + 1):
        tracker.log(step, {"score/mean": step / 10 + shift})
    tracker.on_end(EndEvent(folder, last, {}, {}))
    (folder / "report.html").write_text("")
    tracker.close()


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_metrics_and_settings_are_read_back_and_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    track(tmp_path, 1, 4)
    track(tmp_path, 3, 5, shift=1.0)  # back to the checkpoint of step 2
    events = read(tmp_path)
    scores = [(event.step, round(event.value, 5)) for event in events.Scalars("score/mean")]
    assert scores == [(1, 0.1), (2, 0.2), (3, 1.3), (4, 1.4), (5, 1.5)]
    assert b"actor.lr = 0.001" in events.Tensors("settings")[0].tensor_proto.string_val[0]
    assert str(tmp_path).encode() in events.Tensors("report")[-1].tensor_proto.string_val[0]


def test_a_validation_that_comes_late_has_its_own_step_and_the_report_the_last(tmp_path: Path) -> None:
    tracker = TensorBoardTracker()
    tracker.start(RunStart(tmp_path, "named", 0, 10, {}))
    for step, name in ((1, "score/mean"), (2, "score/mean"), (3, "score/mean"), (2, "eval/score"), (4, "eval/score")):
        tracker.log(step, {name: float(step)})
    tracker.log(3, {"eval/score": 3.0})
    tracker.on_end(EndEvent(tmp_path, 4, {}, {}))
    (tmp_path / "report.html").write_text("")
    tracker.close()
    events = read(tmp_path)
    assert [event.step for event in events.Scalars("score/mean")] == [1, 2, 3]
    assert [(event.step, event.value) for event in events.Scalars("eval/score")] == [(2, 2.0), (4, 4.0), (3, 3.0)]
    assert [event.step for event in events.Tensors("report")] == [4]


def test_text_of_the_model_cannot_break_a_table() -> None:
    row = RolloutRow(1, "r", "t", "", "", None, 0.5, "answered", 0, 3, "user: a | b\n<script>")
    *_, line = markdown_table([row]).splitlines()
    assert line.endswith("| user: a &#124; b<br>&lt;script> |")
    assert line.count("|") == len(RolloutRow._fields) + 1
