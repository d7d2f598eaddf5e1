"""The demo's recipe: a valid configuration, and the tasks it names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toolwise.config.loader import build_config
from toolwise.config.schema import RunConfig
from toolwise.data import load_tasks
from toolwise.demo.recipe import (
    BUDGET,
    BUDGETS,
    HELD_OUT_TASKS,
    ROUTABLE_KINDS,
    TRAIN_TASKS,
    demo_config,
    evaluate_small_frontier,
    write_tasks,
)
from toolwise.errors import CheckpointError
from toolwise.training.run import assemble

torch.set_num_threads(1)


def config(out: Path, seed: int = 3) -> RunConfig:
    return build_config(RunConfig, demo_config(out, seed), source="demo")


def test_the_recipe_is_a_run(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert found.seed == 3
    assert found.model.path == "builtin:small"
    assert found.rollout.n >= 6, "three routes, and a group of each"
    assert found.reward.function == "toolwise.demo.reward:small_world_reward"


def test_its_router_has_a_budget_that_binds(tmp_path: Path) -> None:
    router = config(tmp_path).router
    assert router.enable
    assert router.hard
    assert [budget.limit for budget in router.budgets] == [BUDGET]
    needed = sum(kind != "known" for kind in ROUTABLE_KINDS) / len(ROUTABLE_KINDS)  # one call each
    assert 0 < BUDGET < needed


def test_asking_for_the_recipe_writes_nothing(tmp_path: Path) -> None:
    demo_config(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_its_tasks_are_written_where_it_names_them(tmp_path: Path) -> None:
    found = config(tmp_path)
    write_tasks(found)
    assert found.data.train is not None
    assert found.data.val is not None
    train, held_out = load_tasks(found.data.train), load_tasks(found.data.val)
    assert (len(train), len(held_out)) == (TRAIN_TASKS, HELD_OUT_TASKS)
    assert {t.extra_info["kind"] for t in (*train, *held_out)} == set(ROUTABLE_KINDS)
    assert {t.extra_info["split"] for t in train} == {"train"}
    assert {t.extra_info["split"] for t in held_out} == {"heldout"}
    assert all(str(path).startswith(str(tmp_path)) for path in (found.data.train, found.data.val))


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolwise.demo.recipe.TRAIN_TASKS", 100)


@pytest.mark.usefixtures("few_tasks")
def test_another_seed_has_other_tasks(tmp_path: Path) -> None:
    texts = []
    for seed in (1, 2):
        write_tasks(config(tmp_path / str(seed), seed))
        texts.append((tmp_path / str(seed) / "tasks" / "train.jsonl").read_text(encoding="utf-8"))
    assert texts[0] != texts[1]


@pytest.mark.usefixtures("few_tasks")
def test_a_run_can_be_put_together_from_it(tmp_path: Path) -> None:
    found = config(tmp_path)
    write_tasks(found)
    run = assemble(found)
    assert len(run.validation_tasks) == HELD_OUT_TASKS
    assert set(run.scheduler.tools) == {"calculator", "search"}
    assert len(next(run.batches)) == found.data.batch_size


Cli = Callable[..., Any]
TINY = [
    *("--set", "data.batch_size=4", "--set", "rollout.n=6", "--set", "data.val_limit=3", "--no-frontier"),
    *("--set", "rollout.temperature=1"),  # so that rollouts differ and the actor learns: a run that does not fails
    *("--set", "trainer.total_steps=1", "--set", "rollout.max_new_tokens=24", "--set", "multi_turn.max_turns=2"),
    *("--set", "router.calibration=0.02", "--set", "router.calibration_rollouts=4"),
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
