"""Where the baseline classifiers get their labels: the rows, else the heuristic; and the oracle's routes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from toolwise.agent.inference import TrainedRouter
from toolwise.agent.loader import load_router
from toolwise.data import load_tasks
from toolwise.demo.tasks import write_rows
from toolwise.frontier.baselines import (
    baseline_routers,
    classifier_log_probs,
    targets_by_labels,
    targets_by_oracle,
)
from toolwise.frontier.names import CLASSIFIER, ORACLE_LABELS
from toolwise.models import locate
from toolwise.routing.actions import ROUTES
from toolwise.routing.head.head import HeadSettings, RouterHead, save_head
from toolwise.types import Task

KINDS = {"known": 0, "lookup": 1, "arithmetic": 2}


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> TrainedRouter:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("m") / "routed"
    shutil.copytree(locate("builtin:small"), folder)
    width = int(json.loads((folder / "config.json").read_text())["hidden_size"])
    save_head(RouterHead(HeadSettings(width=width, routes=tuple(map(str, ROUTES)))), folder, {"router": {}})
    return load_router(folder, tools=["calculator", "search"])


def rows(tmp_path: Path, count: int, split: str) -> list[Task]:
    return load_tasks(write_rows(tmp_path / f"{split}.jsonl", count, seed=0, split=split))


def with_label(task: Task, label: str) -> Task:
    return task.model_copy(update={"extra_info": {**task.extra_info, "router_target_action": label}})


def test_oracle_labels_generalize_to_other_rows(routing: TrainedRouter, tmp_path: Path) -> None:
    held_out = rows(tmp_path, 200, "heldout")
    found, notes = baseline_routers(routing, rows(tmp_path, 400, "train"), held_out)
    assert (list(found), notes) == ([CLASSIFIER, ORACLE_LABELS], [])
    values = found[ORACLE_LABELS].values
    assert np.allclose(np.exp(values).sum(axis=1), 1)
    plain = [i for i, task in enumerate(held_out) if task.extra_info["kind"] in KINDS]
    assert np.mean([values[i].argmax() == KINDS[held_out[i].extra_info["kind"]] for i in plain]) > 0.75


def test_labels_do_not_know_what_the_model_has_memorized(routing: TrainedRouter, tmp_path: Path) -> None:
    train = rows(tmp_path, 400, "train")
    targets = Counter((t.extra_info["kind"], str(to)) for t, to in zip(train, targets_by_labels(train), strict=True))
    assert {kind: {to for k, to in targets if k == kind} for kind, _ in targets} == {
        "known": {"SEARCH-FAMILY", "CALCULATE-FAMILY"},
        "lookup": {"SEARCH-FAMILY"},
        "arithmetic": {"CALCULATE-FAMILY"},
        "two_step": {"MIXED"},
    }
    held_out = [task for task in rows(tmp_path, 200, "heldout") if task.extra_info["kind"] in KINDS]
    found, _ = baseline_routers(routing, train, held_out)
    best = found[CLASSIFIER].values.argmax(axis=1)
    assert set(best) == {1, 2}  # no label ever says ANSWER
    needed = [1 if task.extra_info["plan"][0][0] == "search" else 2 for task in held_out]
    assert np.mean(best == needed) > 0.95


def test_labels_of_rows_come_before_the_heuristic(routing: TrainedRouter, tmp_path: Path) -> None:
    train = [with_label(task, "SEARCH-FAMILY") for task in rows(tmp_path, 30, "train")]
    found, _ = baseline_routers(routing, train, train[:5])
    assert (found[CLASSIFIER].values.argmax(axis=1) == 1).all()
    # One labelled row turns the heuristic off for all the others: the two sources are never mixed.
    partly = [train[0], *rows(tmp_path, 3, "train")[1:]]
    assert [str(target) for target in targets_by_labels(partly)] == ["SEARCH-FAMILY", "None", "None"]


def test_without_labels_and_calls_there_is_no_classifier(routing: TrainedRouter) -> None:
    task = Task(task_id="t", prompt=[{"role": "user", "content": "?"}])
    assert targets_by_labels([task]) == targets_by_oracle([task]) == [None]
    found, notes = baseline_routers(routing, [task], [task])
    assert found == {}
    assert "toolwise data label" in notes[0]


def test_without_oracle_routes_there_is_no_oracle_baseline(routing: TrainedRouter) -> None:
    task = with_label(Task(task_id="t", prompt=[{"role": "user", "content": "?"}]), "ANSWER")
    found, notes = baseline_routers(routing, [task], [task])
    assert (list(found), notes) == ([CLASSIFIER], [])


def test_oracle_routes_are_read_from_any_rows() -> None:
    row = Task(task_id="t", prompt=[{"role": "user", "content": "?"}], extra_info={"kind": "mine"})
    routes = ["search", "MIXED", None]
    rows = [row.model_copy(update={"extra_info": {"kind": "mine", "oracle_route": route}}) for route in routes]
    assert targets_by_oracle([row, *rows]) == [None, "SEARCH-FAMILY", "MIXED", None]


def test_mixed_rows_are_left_out() -> None:
    features = np.random.default_rng(0).standard_normal((40, 3))
    targets = [ROUTES[i % 3] for i in range(30)]
    with_mixed = classifier_log_probs(features, [*targets, *["MIXED"] * 10], features)  # type: ignore[list-item]
    assert np.allclose(with_mixed, classifier_log_probs(features[:30], targets, features))
