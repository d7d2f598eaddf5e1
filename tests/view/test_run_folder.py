from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from toolwise.errors import CheckpointError
from toolwise.view.run_folder import open_run

MakeRun = Callable[..., Path]


def test_a_folder_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such run folder"):
        open_run(tmp_path / "nowhere")


def test_a_finished_run_speaks_through_its_own_summary(make_run: MakeRun) -> None:
    run = open_run(make_run(steps=20))
    assert run.finished
    assert run.summary["after"] == json.loads((run.path / "summary.json").read_text())["after"]
    assert run.kinds == ["known", "lookup", "arithmetic", "two_step"]


def test_an_unfinished_run_is_summed_up_from_its_validation_lines(make_run: MakeRun) -> None:
    run = open_run(make_run(steps=25, finished=False))
    assert not run.finished
    assert run.summary["before"]["step"] == 0
    assert run.summary["after"]["step"] == 20
    assert run.summary["before"]["by_kind"]["lookup"]["n"] == 6
    assert run.summary["steps"] == 25


def test_one_validation_is_a_before_without_an_after(make_run: MakeRun) -> None:
    run = open_run(make_run(steps=5, finished=False))
    assert "after" not in run.summary
    assert run.rollouts_before
    assert run.rollouts_after == []


def test_a_series_takes_the_last_word_on_a_step_and_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    lines = [{"step": 2, "a": 1.0}, {"step": 1, "a": 5.0}, {"step": 2, "a": 3.0}, {"step": 3, "a": None}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    assert open_run(tmp_path).series("missing", "a") == ([1, 2], [5.0, 3.0])


def test_a_series_ignores_nan_written_by_others(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "a": math.nan}) + "\n")
    assert open_run(tmp_path).series("a") == ([], [])


def test_a_summary_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"summary\.json: not JSON"):
        _ = open_run(tmp_path).summary
