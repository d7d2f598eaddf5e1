"""Frontier evaluation: the parts that `tests/cli/test_run.py` does not cover."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from toolwise.agent.inference import TrainedRouter
from toolwise.agent.loader import load_router
from toolwise.config.router import RouterConfig
from toolwise.data import load_tasks
from toolwise.demo.tasks import write_rows
from toolwise.frontier.evaluation import other_budgets, route_values
from toolwise.models import locate
from toolwise.routing.families import ROUTES
from toolwise.routing.head.head import HeadSettings, RouterHead, save_head
from toolwise.types import Task


def folder_of(tmp: Path, mode: str) -> Path:
    torch.set_num_threads(1)
    folder = tmp / mode
    shutil.copytree(locate("builtin:small"), folder)
    width = int(json.loads((folder / "config.json").read_text())["hidden_size"])
    head = RouterHead(HeadSettings(width=width, routes=tuple(map(str, ROUTES)), mode=mode))  # type: ignore[arg-type]
    with torch.no_grad():
        head.out.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    save_head(head, folder, {"router": {"enable": True, "mode": mode}})
    return folder


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> TrainedRouter:
    return load_router(folder_of(tmp_path_factory.mktemp("m"), "policy"), tools=["calculator", "search"])


def rows(tmp_path: Path, count: int, split: str) -> list[Task]:
    return load_tasks(write_rows(tmp_path / f"{split}.jsonl", count, seed=0, split=split))


def test_predictions_do_not_depend_on_the_batch(routing: TrainedRouter, tmp_path: Path) -> None:
    tasks = rows(tmp_path, 20, "heldout")
    whole, part = route_values(routing, tasks), route_values(routing, tasks[:3])
    assert whole.costs is None
    assert whole.samples
    assert np.allclose(whole.values[:3], part.values, atol=1e-4)


def test_a_value_head_gives_rewards_and_costs(tmp_path: Path) -> None:
    found = route_values(load_router(folder_of(tmp_path, "value"), tools=["search"]), rows(tmp_path, 4, "heldout"))
    assert found.costs is not None
    assert found.values.shape == found.costs.shape == (4, 3)
    assert not found.samples


def test_budgets_that_thresholds_do_not_know_are_noted() -> None:
    budgets = [{"limit": 0.4, "unit": "search"}, {"limit": 0.2, "unit": "calculate"}]
    both = RouterConfig.model_validate({"cost": "calls", "budgets": budgets})
    assert other_budgets(both) == ["these budgets are in 'search'; those in 'calculate' are not kept"]
    assert other_budgets(RouterConfig()) == other_budgets(both.model_copy(update={"budgets": both.budgets[:1]})) == []
