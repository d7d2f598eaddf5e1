from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from toolwise.errors import CheckpointError
from toolwise.training.run_folder import open_run

MakeRun = Callable[..., Path]


def test_a_missing_folder_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such run folder"):
        open_run(tmp_path / "nowhere")


def test_a_finished_run_uses_its_own_summary(make_run: MakeRun) -> None:
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


@pytest.mark.parametrize(
    ("summary", "finished"),
    [
        ({"steps": 12, "total_steps": 12, "interrupted": False, "after": None}, True),  # no validation data
        ({"steps": 85, "total_steps": 100, "interrupted": True, "after": {"score": 0.5}}, False),
        ({"steps": 5, "total_steps": 12, "interrupted": False}, False),
        ({"steps": 12, "after": {"score": 0.5}}, True),  # written by an older version
        ({"steps": 12, "after": None}, False),
    ],
)
def test_a_run_is_finished_at_its_last_step_and_not_by_a_validation(
    summary: dict[str, object], finished: bool, tmp_path: Path
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert open_run(tmp_path).finished is finished


def test_an_interrupted_run_shows_its_last_validation_with_its_step(make_run: MakeRun) -> None:
    path = make_run(steps=25, finished=False)
    summary = {"steps": 25, "total_steps": 100, "interrupted": True, "before": None, "after": None}
    (path / "summary.json").write_text(json.dumps(summary))
    run = open_run(path)
    assert (run.summary["before"]["step"], run.summary["after"]["step"]) == (0, 20)


def test_one_validation_in_the_middle_is_not_one_before_training(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 10, "eval/score": 0.5}) + "\n")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "eval-000010.jsonl").write_text('{"kind": "a"}\n')
    run = open_run(tmp_path)
    assert "before" not in run.summary
    assert (run.summary["after"]["step"], run.summary["after"]["n"]) == (10, 1)


def test_one_validation_is_a_before_without_an_after(make_run: MakeRun) -> None:
    run = open_run(make_run(steps=5, finished=False))
    assert "after" not in run.summary
    assert run.rollouts_before
    assert run.rollouts_after == []


def test_a_series_uses_the_last_value_of_a_step_and_omits_non_finite_ones(tmp_path: Path) -> None:
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
