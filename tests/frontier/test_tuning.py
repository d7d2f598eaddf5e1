"""Tuning of the baselines: which rows, and which candidate."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from trained_router import small_router

from toolwise.agent.inference import TrainedRouter
from toolwise.data import load_tasks
from toolwise.demo.tasks import write_rows
from toolwise.frontier.baselines import CLASSIFIER, ORACLE_LABELS
from toolwise.frontier.confidence import CONFIDENCE, NOT_TAKEN
from toolwise.frontier.prompted import PROMPTED
from toolwise.frontier.rollout_pool import ALL_TOOLS, OutcomeTable
from toolwise.frontier.router_comparison import RouteValues
from toolwise.frontier.tuning import MIN_TUNING_ROWS, baseline_routers, choose_candidate, tuning_tasks
from toolwise.routing.families import ROUTES
from toolwise.types import Task

NAMES = [route.value for route in ROUTES]
COLUMNS = (*NAMES, ALL_TOOLS)
BUDGETS = [0.0, 0.3, 0.6]


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> TrainedRouter:
    return small_router(tmp_path_factory.mktemp("m"))


def rows(tmp_path: Path, count: int, split: str) -> list[Task]:
    return load_tasks(write_rows(tmp_path / f"{split}.jsonl", count, seed=0, split=split))


def outcomes_of(tasks: list[Task]) -> OutcomeTable:
    """Right under the oracle's route and with all tools, else wrong; a call costs 1."""
    right = [ROUTES.index(task.extra_info["oracle_route"]) if _plain(task) else 0 for task in tasks]
    scores = np.concatenate([np.eye(3)[right], np.ones((len(tasks), 1))], axis=1)[:, :, None]
    costs = np.tile(np.array([0.0, 1.0, 1.0, 1.0])[:, None], (len(tasks), 1, 1))
    return OutcomeTable(tuple(task.task_id for task in tasks), COLUMNS, scores, costs)


def _plain(task: Task) -> bool:
    return task.extra_info["oracle_route"] in NAMES


def test_rows_that_the_router_only_calibrated_on_come_first(tmp_path: Path) -> None:
    train = rows(tmp_path, 30, "train")
    ids = [task.task_id for task in train[20:]]
    (tmp_path / "calibration.json").write_text(json.dumps({"task_ids": ids}))
    found = tuning_tasks(train, [], tmp_path, 12)
    assert [task.task_id for task in found] == [*ids, train[0].task_id, train[1].task_id]
    assert tuning_tasks(train, [], None, 12) == train[:12]


def test_rows_to_evaluate_are_not_tuned_on(tmp_path: Path) -> None:
    train = rows(tmp_path, 30, "train")
    assert tuning_tasks(train, train[:10], None, 12) == train[10:22]
    assert tuning_tasks(train, train[:25], None, 12) == []  # too few are left
    assert tuning_tasks(train, [], None, MIN_TUNING_ROWS - 1) == []


def test_the_best_candidate_on_the_tuning_rows_is_chosen(tmp_path: Path) -> None:
    tasks = [task for task in rows(tmp_path, 80, "train") if _plain(task)]
    outcomes = outcomes_of(tasks)
    right = outcomes.mean_over_draws("scores")[:, :3]
    candidates = {"wrong": RouteValues(-right), "right": RouteValues(right), "also right": RouteValues(right)}
    assert choose_candidate(candidates, outcomes, BUDGETS, NAMES, 0) == "right"
    # Rows after the tuning rows are not looked at.
    more = {name: RouteValues(np.concatenate([each.values, -each.values])) for name, each in candidates.items()}
    assert choose_candidate(more, outcomes, BUDGETS, NAMES, 0) == "right"


def test_every_baseline_is_tuned_and_says_how(routing: TrainedRouter, tmp_path: Path) -> None:
    train, tasks = rows(tmp_path, 60, "train"), rows(tmp_path, 10, "heldout")
    tuning = train[:20]
    found, notes = asyncio.run(baseline_routers(routing, train, tasks, tuning, outcomes_of(tuning), BUDGETS))
    assert list(found) == [CLASSIFIER, ORACLE_LABELS, CONFIDENCE, PROMPTED]
    assert [len(each.values) for each in found.values()] == [10] * 4
    assert found[CONFIDENCE].columns == COLUMNS
    assert len(notes) == 4
    assert notes[2].startswith("confidence: ")
    assert notes[2].endswith("(the best of 8 on 20 tuning rows)")


def test_without_tuning_rows_there_are_only_the_classifiers(routing: TrainedRouter, tmp_path: Path) -> None:
    train, tasks = rows(tmp_path, 60, "train"), rows(tmp_path, 10, "heldout")
    found, notes = asyncio.run(baseline_routers(routing, train, tasks, [], None, BUDGETS))
    assert (list(found), notes) == ([CLASSIFIER, ORACLE_LABELS], [])


OWN = [
    {"name": "look_up", "tools": ["search"]},
    {"name": "answer"},
    {"name": "slowly", "note": "Take your time."},
    {"name": "translate", "tools": ["translator"]},
]


def test_routes_of_ones_own_have_a_confidence_and_a_prompted_router(tmp_path: Path) -> None:
    routing = small_router(tmp_path, OWN)
    train, tasks = rows(tmp_path, 40, "train"), rows(tmp_path, 10, "heldout")
    tuning, names = train[:20], [*(str(route["name"]) for route in OWN), ALL_TOOLS]
    scores = np.tile(np.array([1.0, 0.0, 0.0, 0.0, 1.0])[:, None], (20, 1, 1))
    outcomes = OutcomeTable(tuple(t.task_id for t in tuning), tuple(names), scores, scores.copy())
    found, notes = asyncio.run(baseline_routers(routing, train, tasks, tuning, outcomes, BUDGETS))
    assert {CONFIDENCE, PROMPTED} <= set(found)
    asked = found[PROMPTED].values
    assert np.isneginf(asked[:, 3]).all(), "no task has a translator"
    assert np.allclose(np.exp(asked).sum(axis=1), 1)
    confident = found[CONFIDENCE]
    assert confident.columns == tuple(names)
    assert (confident.values[:, 1] < 0).all(), "the first route without tools answers"
    assert (confident.values[:, 3] == NOT_TAKEN).all()
    assert not any("no confidence" in note for note in notes)


def test_without_a_direct_answer_there_is_no_confidence_router(tmp_path: Path) -> None:
    routing = small_router(
        tmp_path, [{"name": "look_up", "tools": ["search"]}, {"name": "sum", "tools": ["calculator"]}]
    )
    train, tasks = rows(tmp_path, 40, "train"), rows(tmp_path, 4, "heldout")
    ones = np.ones((20, 3, 1))
    outcomes = OutcomeTable(tuple(t.task_id for t in train[:20]), ("look_up", "sum", ALL_TOOLS), ones, ones)
    found, notes = asyncio.run(baseline_routers(routing, train, tasks, train[:20], outcomes, BUDGETS))
    assert PROMPTED in found
    assert CONFIDENCE not in found
    assert "no confidence router: it needs a route without tools that the model itself answers" in notes
