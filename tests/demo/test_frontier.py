"""The demo's frontier: small, stored in the run folder, resumable, and saved for use with budgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.demo.frontier import BUDGETS, evaluate_small_frontier
from toolwise.demo.recipe import BUDGET
from toolwise.errors import CheckpointError

Cli = Callable[..., Any]
TINY = [
    *("--set", "data.batch_size=2", "--set", "rollout.n=6", "--set", "data.val_limit=3", "--no-frontier"),
    *("--set", "rollout.temperature=2"),  # so that rollouts differ and the actor learns: a run that does not fails
    *("--set", "trainer.total_steps=1", "--set", "rollout.max_new_tokens=24", "--set", "multi_turn.max_turns=2"),
]
SIZE = {"tasks": 8, "draws": 2, "replicates": 20}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> Path:
    folder: Path = tmp_path_factory.mktemp("demo") / "run"
    ended = cli("demo", "--out", folder, *TINY)
    assert ended.status == 0, ended.err
    assert not (folder / "frontier.json").exists()
    return folder


@pytest.mark.long
def test_it_is_made_of_the_last_checkpoint_and_kept(run: Path, cli: Cli) -> None:
    seen: list[tuple[int, int]] = []
    found = asyncio.run(evaluate_small_frontier(run, **SIZE, on_done=lambda what, done, of: seen.append((done, of))))
    assert seen[0] == (0, 12)
    assert seen[-1] == (12, 12)
    assert found.frontier.rows == 3
    told = json.loads((run / "frontier.json").read_bytes())
    assert {"always ANSWER", "always SEARCH-FAMILY", "always CALCULATE-FAMILY", "ALL-TOOLS"} <= set(told["fixed"])
    assert {"router", "random", "oracle", "classifier"} <= set(told["curves"])
    assert (run / "frontier.png").read_bytes().startswith(b"\x89PNG")
    asked = cli("run", run, "What is 2 + 2?", "--budget", "0.3", "--json")
    assert asked.status == 0, asked.err
    again: list[tuple[int, int]] = []
    asyncio.run(evaluate_small_frontier(run, **SIZE, on_done=lambda what, done, of: again.append((done, of))))
    assert again[0] == (12, 12), "what has been rolled out is not rolled out again"


def test_the_budget_that_was_trained_for_is_among_those_shown() -> None:
    assert BUDGET in BUDGETS


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run"):
        asyncio.run(evaluate_small_frontier(tmp_path))
