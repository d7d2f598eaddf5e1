"""`toolwise score`: a run's rollouts scored again, with what changed, in a separate file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_runs_own_reward_says_the_same_again(run: Path, cli: Cli) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ended = cli("score", run, "--json")
    assert (ended.status, ended.err) == (0, "")
    told = json.loads(ended.out)
    assert (told["rollouts"], told["changed"], told["old_errors"], told["new_errors"]) == (8, 0, {}, {})
    assert told["old_mean"] == pytest.approx(told["new_mean"])
    rows = rows_of(Path(told["out"]))
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4
    assert {path: path.read_bytes() for path in before} == before


def test_a_changed_reward_is_shown_beside_the_old(run: Path, tmp_path: Path, cli: Cli) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("def judge(messages, ground_truth, bonus=0.0):\n    return len(messages) + bonus\n")
    out = tmp_path / "new.jsonl"
    options = ["--reward", f"{judge}:judge", "--kwargs", "bonus=100", "--step", 2, "--out", out]
    ended = cli("score", run, *options)
    assert (ended.status, ended.err) == (0, "")
    assert "4 of 4 rollouts changed score" in ended.out
    assert f"wrote 4 rollouts to {out}" in ended.out
    assert [row["score"] for row in rows_of(out)] == [len(row["messages"]) + 100 for row in rows_of(out)]
    again = cli("score", run, *options)
    assert again.status == 2
    assert "new.jsonl already exists; give another --out" in again.err


@pytest.mark.long
def test_faults_that_went_away_are_counted(run: Path, tmp_path: Path, cli: Cli) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("def judge(messages, ground_truth):\n    raise ValueError('not yet')\n")
    broken = tmp_path / "broken.jsonl"
    ended = cli("score", run, "--reward", f"{judge}:judge", "--out", broken)
    assert ended.status == 0
    assert "exception errors" in ended.out
    judge.write_text("def judge(messages, ground_truth):\n    return 1.0\n")
    told = json.loads(cli("score", broken, "--reward", f"{judge}:judge", "--json").out)
    assert (told["old_errors"], told["new_errors"]) == ({"exception": 8}, {})
    assert (told["old_mean"], told["new_mean"], told["changed"]) == (None, 1.0, 8)
    assert Path(told["out"]).name == "broken-rescored-judge.jsonl"


def test_validation_rollouts_can_be_scored_again(run: Path, cli: Cli) -> None:
    told = json.loads(cli("score", run, "--validation", "--step", 0, "--json").out)
    assert (told["rollouts"], told["changed"]) == (4, 0)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, cli: Cli) -> None:
    ended = cli("score", tmp_path, "--reward", "toolwise.demo.reward:small_world_reward")
    assert ended.status == 2
    assert "has no step-*.jsonl; give the folder of a run" in ended.err


def test_a_file_needs_a_reward(run: Path, cli: Cli) -> None:
    ended = cli("score", run / "rollouts" / "step-000001.jsonl")
    assert ended.status == 2
    assert "--reward" in ended.err
