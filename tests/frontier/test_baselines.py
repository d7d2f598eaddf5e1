"""Where the baseline classifiers get their labels: the rows, else the heuristic; and the oracle's routes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from trained_router import small_router

from toolwise.agent.inference import TrainedRouter
from toolwise.data import load_tasks
from toolwise.demo.tasks import write_rows
from toolwise.errors import ConfigError
from toolwise.frontier.baselines import (
    CLASSIFIER,
    ORACLE_LABELS,
    Classifier,
    classifier_candidates,
    classifier_log_probs,
    fit_classifier,
    targets_by_labels,
    targets_by_oracle,
    training_rows,
)
from toolwise.frontier.router_comparison import RouteValues
from toolwise.routing.families import ROUTES
from toolwise.types import Task

KINDS = {"known": 0, "lookup": 1, "arithmetic": 2}


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> TrainedRouter:
    return small_router(tmp_path_factory.mktemp("m"))


def rows(tmp_path: Path, count: int, split: str) -> list[Task]:
    return load_tasks(write_rows(tmp_path / f"{split}.jsonl", count, seed=0, split=split))


def classifiers(
    routing: TrainedRouter, train: list[Task], tasks: list[Task]
) -> tuple[dict[str, RouteValues], list[str]]:
    found, notes = classifier_candidates(routing, train, tasks)
    return {name: values for name, each in found.items() for values in each.values()}, notes


def with_label(task: Task, label: str) -> Task:
    return task.model_copy(update={"extra_info": {**task.extra_info, "router_target_action": label}})


@pytest.mark.long
def test_oracle_labels_generalize_to_other_rows(routing: TrainedRouter, tmp_path: Path) -> None:
    held_out = rows(tmp_path, 200, "heldout")
    found, notes = classifiers(routing, rows(tmp_path, 400, "train"), held_out)
    assert (list(found), notes) == ([CLASSIFIER, ORACLE_LABELS], [])
    values = found[ORACLE_LABELS].values
    assert np.allclose(np.exp(values).sum(axis=1), 1)
    plain = [i for i, task in enumerate(held_out) if task.extra_info["kind"] in KINDS]
    assert np.mean([values[i].argmax() == KINDS[held_out[i].extra_info["kind"]] for i in plain]) > 0.75


@pytest.mark.long
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
    found, _ = classifiers(routing, train, held_out)
    best = found[CLASSIFIER].values.argmax(axis=1)
    assert set(best) == {1, 2}  # no label ever says ANSWER
    needed = [1 if task.extra_info["plan"][0][0] == "search" else 2 for task in held_out]
    assert np.mean(best == needed) > 0.95


def test_labels_of_rows_come_before_the_heuristic(routing: TrainedRouter, tmp_path: Path) -> None:
    train = [with_label(task, "SEARCH-FAMILY") for task in rows(tmp_path, 30, "train")]
    found, _ = classifiers(routing, train, train[:5])
    assert (found[CLASSIFIER].values.argmax(axis=1) == 1).all()
    # One labelled row turns the heuristic off for all the others: the two sources are never mixed.
    partly = [train[0], *rows(tmp_path, 3, "train")[1:]]
    assert [str(target) for target in targets_by_labels(partly)] == ["SEARCH-FAMILY", "None", "None"]


def test_without_labels_and_calls_there_is_no_classifier(routing: TrainedRouter) -> None:
    task = Task(task_id="t", prompt=[{"role": "user", "content": "?"}])
    assert targets_by_labels([task]) == targets_by_oracle([task]) == [None]
    found, notes = classifiers(routing, [task], [task])
    assert found == {}
    assert "toolwise data label" in notes[0]


def test_without_oracle_routes_there_is_no_oracle_baseline(routing: TrainedRouter) -> None:
    task = with_label(Task(task_id="t", prompt=[{"role": "user", "content": "?"}]), "ANSWER")
    found, notes = classifiers(routing, [task], [task])
    assert (list(found), notes) == ([CLASSIFIER], [])


def test_oracle_routes_are_read_from_any_rows() -> None:
    row = Task(task_id="t", prompt=[{"role": "user", "content": "?"}], extra_info={"kind": "mine"})
    routes = ["search", "MIXED", None]
    rows = [row.model_copy(update={"extra_info": {"kind": "mine", "oracle_route": route}}) for route in routes]
    assert targets_by_oracle([row, *rows]) == [None, "SEARCH-FAMILY", "MIXED", None]


def test_a_classifier_for_each_penalty(routing: TrainedRouter, tmp_path: Path) -> None:
    train = rows(tmp_path, 60, "train")
    found, _ = classifier_candidates(routing, train, train[:5], [1e-3, 1.0])
    loose, tight = found[CLASSIFIER].values()
    assert list(found[CLASSIFIER]) == ["l2 = 0.001", "l2 = 1"]
    assert np.ptp(tight.values) < np.ptp(loose.values)


def test_without_training_rows_there_is_a_note(routing: TrainedRouter) -> None:
    train, notes = training_rows(routing, None)
    assert (train, classifier_candidates(routing, train, [])) == ((), ({}, []))
    assert notes[0].startswith("no classifier: ")


def test_mixed_rows_are_left_out() -> None:
    features = np.random.default_rng(0).standard_normal((40, 3))
    targets = [ROUTES[i % 3] for i in range(30)]
    with_mixed = classifier_log_probs(features, [*targets, *["MIXED"] * 10], features)  # type: ignore[list-item]
    assert np.allclose(with_mixed, classifier_log_probs(features[:30], targets, features))


def blobs(rows: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, rows)
    centres = np.array([[0, 0, 3.0], [2, 0, 0], [0, 2, 0]])
    return centres[labels] + rng.standard_normal((rows, 3)), labels.tolist()


def loss(found: Classifier, features: np.ndarray, labels: list[int], l2: float = 1e-3) -> float:
    picked = found.log_probs(features)[np.arange(len(labels)), labels]
    return float(-picked.mean() + l2 / 2 * (found.weight**2).sum())


def test_it_separates_separable_labels() -> None:
    features, labels = blobs(300)
    found = fit_classifier(features, labels, 3)
    fresh, truth = blobs(300, seed=1)
    assert np.allclose(np.exp(found.log_probs(fresh)).sum(axis=1), 1)
    assert (found.log_probs(fresh).argmax(axis=1) == truth).mean() > 0.85


def test_no_small_change_of_its_weights_lowers_the_loss() -> None:
    features, labels = blobs(200)
    found = fit_classifier(features, labels, 3)
    least = loss(found, features, labels)
    rng = np.random.default_rng(0)
    for _ in range(20):
        nudged = Classifier(
            found.weight + 1e-3 * rng.standard_normal(found.weight.shape),
            found.bias + 1e-3 * rng.standard_normal(3),
            found.mean,
            found.scale,
        )
        assert loss(nudged, features, labels) > least - 1e-9


def test_features_of_any_size_and_constant_ones_do_no_harm() -> None:
    features, labels = blobs(200)
    scaled = np.concatenate([features * [1e4, 1e-4, 1], np.full((200, 1), 7.0)], axis=1)
    plain, found = fit_classifier(features, labels, 3), fit_classifier(scaled, labels, 3)
    assert np.allclose(plain.log_probs(features), found.log_probs(scaled), atol=1e-3)


def test_rows_without_a_label_are_left_out() -> None:
    features, labels = blobs(100)
    noise = np.concatenate([features, np.full((50, 3), 99.0)])
    partly = fit_classifier(noise, [*labels, *[None] * 50], 3)
    assert np.allclose(partly.weight, fit_classifier(features, labels, 3).weight)
    with pytest.raises(ConfigError, match="no labelled rows"):
        fit_classifier(features, [None] * 100, 3)
