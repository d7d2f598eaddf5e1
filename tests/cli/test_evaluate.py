"""`toolwise eval`: metrics of a run, and of other models and tasks. test_run.py tests all of `eval --budgets`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.cli.evaluate import read_budgets
from toolwise.errors import ConfigError

Cli = Callable[..., Any]


def figures(cli: Cli, *arguments: object) -> dict[str, Any]:
    ended = cli("eval", *arguments, "--json")
    assert (ended.status, ended.err) == (0, "")
    found: dict[str, Any] = json.loads(ended.out)
    return found


@pytest.fixture(scope="module")
def summary(tiny_run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tiny_run / "summary.json").read_bytes())
    return found


def test_a_run_gives_the_figures_of_its_summary(tiny_run: Path, summary: dict[str, Any], cli: Cli) -> None:
    assert figures(cli, tiny_run) == summary["after"]


def test_a_configuration_gives_the_figures_from_before(tiny_run: Path, summary: dict[str, Any], cli: Cli) -> None:
    assert figures(cli, tiny_run.parent / "run.toml") == summary["before"]


def test_another_model_can_be_named(tiny_run: Path, summary: dict[str, Any], cli: Cli) -> None:
    assert figures(cli, tiny_run, "--model", "builtin:small") == summary["before"]


@pytest.mark.long
def test_any_checkpoint_can_be_named(tiny_run: Path, summary: dict[str, Any], cli: Cli) -> None:
    assert figures(cli, tiny_run / "checkpoints" / "step-000002") == summary["after"]
    earlier = figures(cli, tiny_run / "checkpoints" / "step-000001")
    assert earlier == figures(cli, tiny_run, "--model", tiny_run / "checkpoints" / "step-000001" / "model")


@pytest.mark.long
def test_other_tasks_can_be_named(tiny_run: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = (tiny_run.parent / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(rows[:2]), encoding="utf-8")
    assert figures(cli, tiny_run, "--data", "few.jsonl")["n"] == 2
    assert figures(cli, tiny_run, "--set", "data.val=few.jsonl")["n"] == 2


def test_the_limit_on_held_out_tasks_holds_here_too(tiny_run: Path, cli: Cli) -> None:
    assert figures(cli, tiny_run, "--set", "data.val_limit=3")["n"] == 3


def test_nothing_is_learned_and_nothing_written(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    figures(cli, run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_figures_are_shown_as_a_table(tiny_run: Path, cli: Cli) -> None:
    ended = cli("eval", tiny_run)
    assert ended.status == 0
    assert "one rollout per task" in ended.out
    for word in ("all", "score", "correct", "cost", "tokens", "errors"):
        assert word in ended.out


def test_a_reward_can_be_changed(tiny_run: Path, summary: dict[str, Any], cli: Cli) -> None:
    dear = figures(cli, tiny_run, "--set", "reward.kwargs.price_per_call=1.0")
    assert dear["correct"] == summary["after"]["correct"]
    assert dear["score"] == pytest.approx(dear["correct"] - dear["calls"])


def test_an_ellipsis_continues_the_budgets() -> None:
    assert read_budgets("0,0.1,…,1") == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert read_budgets("0, 0.25, ..., 1, 3") == [0.0, 0.25, 0.5, 0.75, 1.0, 3.0]


def test_budgets_are_sorted_and_unique() -> None:
    assert read_budgets("0.6,0.2,0.6") == [0.2, 0.6]


@pytest.mark.parametrize("text", ["", "x", ",", "0,…", "…,1", "0,…,1", "1,0.5,…,0", "0,1e-9,…,1", "-1", "nan", "inf"])
def test_budgets_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--budgets"):
        read_budgets(text)
