from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.errors import CheckpointError
from toolwise.training.trackers.jsonl import JsonlTracker, read_metrics, truncate_after


def log_steps(path: Path, *steps: int) -> None:
    tracker = JsonlTracker(path)
    for step in steps:
        tracker.log(step, {"score/mean": step / 10})
    tracker.close()


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "deep" / "metrics.jsonl")
    tracker.log(1, {"score/mean": 0.5})
    assert read_metrics(tracker.path) == [{"step": 1, "score/mean": 0.5}]
    tracker.close()


def test_what_is_not_finite_is_null_and_keeps_its_name(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(3, {"loss": math.nan, "up": math.inf, "down": -math.inf, "fine": 1.5})
    tracker.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text) == {"step": 3, "loss": None, "up": None, "down": None, "fine": 1.5}


def test_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    log = JsonlTracker(tmp_path / "m.jsonl")
    log.log(1, {"a": np.float32(0.5), "b": np.int64(3)})
    log.close()
    assert read_metrics(log.path) == [{"step": 1, "a": 0.5, "b": 3}]


def test_a_metric_named_step_does_not_replace_the_step(tmp_path: Path) -> None:
    log = JsonlTracker(tmp_path / "m.jsonl")
    log.log(7, {"step": 99.0})
    log.close()
    assert read_metrics(log.path) == [{"step": 7}]


def test_a_second_tracker_appends(tmp_path: Path) -> None:
    log_steps(tmp_path / "m.jsonl", 1)
    log_steps(tmp_path / "m.jsonl", 2)
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2]


def test_an_incomplete_last_line_is_not_joined_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "sc')
    log_steps(path, 2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_a_complete_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}')
    log_steps(path, 2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_reading_leaves_out_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "reason": "\xc3')
    assert read_metrics(path) == [{"step": 1}]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []
    assert truncate_after(tmp_path / "none.jsonl", 3) == 0


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"m\.jsonl, line 2"):
        read_metrics(path)


def test_truncating_drops_later_steps_and_the_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log_steps(path, 0, 1, 2, 2, 3, 4)
    with path.open("ab") as file:
        file.write(b'{"step": 1, "to')
    assert truncate_after(path, 2) == 3
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_truncating_what_needs_none_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log_steps(path, 1, 2)
    before = path.stat().st_ino, path.read_bytes()
    assert truncate_after(path, 5) == 0
    assert (path.stat().st_ino, path.read_bytes()) == before


@given(
    steps=st.lists(st.integers(0, 20), max_size=12),
    cut=st.integers(0, 20),
    torn=st.integers(0, 400),
)
def test_after_any_crash_a_truncated_file_holds_complete_lines_up_to_the_step(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int, torn: int
) -> None:
    path = tmp_path_factory.mktemp("crash") / "m.jsonl"
    log_steps(path, *steps)
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - torn)])
    survived = [line["step"] for line in read_metrics(path)]
    truncate_after(path, cut)
    log_steps(path, cut + 1)
    expected = [step for step in survived if step <= cut]
    assert [line["step"] for line in read_metrics(path)] == [*expected, cut + 1]


def test_a_validation_that_will_be_repeated_is_dropped(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    for step in (1, 2, 3):
        tracker.log(step, {"score/mean": 0.1})
        tracker.log(step, {"eval/score": 0.2})
    tracker.close()
    assert truncate_after(tracker.path, 2, validation=False) == 3
    assert [(line["step"], "eval/score" in line) for line in read_metrics(tracker.path)] == [
        (1, False),
        (1, True),
        (2, False),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"step": "six"}', "step is 'six', not a number"),
        ('{"step": [1]}', r"step is \[1\], not a number"),
        ('{"step": null}', "step is None, not a number"),
        ('{"step": Infinity}', "step is inf, not a number"),
        (f'{{"step": {"9" * 400}}}', "step is 999.*, not a number"),
        (f'{{"step": 2, "loss": -{"9" * 400}}}', "'loss' is a number of more than 1000 bits"),
    ],
    ids=lambda value: value[:20],
)
def test_a_line_that_no_tracker_writes_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(CheckpointError, match=f"line 2: {problem}.*; remove that line"):
        read_metrics(path)
