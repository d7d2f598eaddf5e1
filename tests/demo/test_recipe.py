"""The demo's recipe: a valid configuration, and the tasks it names."""

from __future__ import annotations

from pathlib import Path

import torch

from toolwise.config.loader import build_config
from toolwise.config.schema import RunConfig
from toolwise.data import load_tasks
from toolwise.demo.recipe import BUDGET, HELD_OUT_TASKS, ROUTABLE_KINDS, TRAIN_TASKS, demo_config, write_tasks
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


def test_another_seed_has_other_tasks(tmp_path: Path) -> None:
    texts = []
    for seed in (1, 2):
        write_tasks(config(tmp_path / str(seed), seed))
        texts.append((tmp_path / str(seed) / "tasks" / "train.jsonl").read_text(encoding="utf-8"))
    assert texts[0] != texts[1]


def test_a_run_can_be_put_together_from_it(tmp_path: Path) -> None:
    found = config(tmp_path)
    write_tasks(found)
    run = assemble(found)
    assert len(run.validation_tasks) == HELD_OUT_TASKS
    assert set(run.scheduler.tools) == {"calculator", "search"}
    assert len(next(run.batches)) == found.data.batch_size
