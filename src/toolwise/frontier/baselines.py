"""Classifiers that a learned router is compared with: logistic regression from a prompt's features to its route label.
They differ in where the labels of the training rows come from.

classifier      labels that a labeller could provide: those of the rows, else the heuristic's. A labeller reads the
                question and its tools, but does not know what the model has memorized
oracle labels   `extra_info.oracle_route`, set by the author of the rows, who does know: what the router has to find out

Related: CARROT (arXiv 2502.03261) predicts the score and the cost of every route instead of a label, as the learned
router's value head does (`router.mode = "value"`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolwise.agent.inference import TrainedRouter
from toolwise.errors import ConfigError
from toolwise.frontier.router_comparison import RouteValues
from toolwise.routing.families import MIXED, Target, families_of_task
from toolwise.routing.learned_router import target_of
from toolwise.routing.routes import DEFAULT_ROUTES, RouteSet, heuristic_route
from toolwise.routing.threshold import Floats
from toolwise.tools.base import BaseTool
from toolwise.training.tasks import attach_labels, load_split
from toolwise.types import Task

CLASSIFIER, ORACLE_LABELS = "classifier", "oracle labels"
DEFAULT_L2, PENALTIES = 1e-3, (1e-3, 1e-2, 1e-1)
"""The l2 penalty of a classifier that is not tuned, and those that tuning chooses from."""
ORACLE_ROUTE_KEY = "oracle_route"
"""In `extra_info`: the best route for the row (or MIXED), where the author of the rows knows it."""


def targets_by_labels(
    tasks: Sequence[Task], tools: Mapping[str, BaseTool] | None = None, routes: RouteSet = DEFAULT_ROUTES
) -> list[Target | None]:
    """The labels of the rows; if no row has one, those that `toolwise data label --heuristic` would give."""
    labels = [target_of(task, routes) for task in tasks]
    if any(target is not None for target in labels):
        return labels
    return [heuristic_route(task, families_of_task(task, tools, any_name=routes.own), routes) for task in tasks]


def targets_by_oracle(tasks: Sequence[Task], routes: RouteSet = DEFAULT_ROUTES) -> list[Target | None]:
    """The oracle's route of each row; None for rows without one, or with one for other routes than a user's."""
    return [target_of(task, routes, key=ORACLE_ROUTE_KEY) for task in tasks]


def classifier_log_probs(
    train_features: Floats,
    targets: Sequence[Target | None],
    features: Floats,
    routes: RouteSet = DEFAULT_ROUTES,
    *,
    l2: float = DEFAULT_L2,
) -> Floats:
    """Route log-probs [rows, routes] for `features`, from a classifier fitted to `targets`. MIXED rows are left out."""
    labels = [None if target is None or target == MIXED else routes.index(target) for target in targets]
    return fit_classifier(train_features, labels, len(routes), l2=l2).log_probs(features)


def training_rows(routing: TrainedRouter, train: Sequence[Task] | None) -> tuple[Sequence[Task], list[str]]:
    """The rows that baselines are fitted to and tuned on, by default the run's training rows with its labels, and why
    there are none."""
    try:
        return attach_labels(routing.config, load_split(routing.config, "train")) if train is None else train, []
    except ConfigError as error:
        return (), [f"no classifier: {error}"]


def classifier_candidates(
    routing: TrainedRouter, train: Sequence[Task], tasks: Sequence[Task], penalties: Sequence[float] = (DEFAULT_L2,)
) -> tuple[dict[str, dict[str, RouteValues]], list[str]]:
    """Each classifier's route values for `tasks` by its l2 penalty, from the same features as the head's; and why a
    classifier is missing. `train` are the rows they are fitted to."""
    if not train:
        return {}, []
    routes = routing.routes
    by_labels = targets_by_labels(train, routing.tools, routes)
    targets = {CLASSIFIER: by_labels, ORACLE_LABELS: targets_by_oracle(train, routes)}
    usable = {name: each for name, each in targets.items() if any(t not in (None, MIXED) for t in each)}
    notes = (
        []
        if CLASSIFIER in usable
        else ["no classifier: no training row has a label or gold calls; label them with toolwise data label"]
    )
    if not usable:
        return {}, notes
    train_features, features = routing.features(train), routing.features(tasks)
    return {
        name: {
            f"l2 = {l2:g}": RouteValues(classifier_log_probs(train_features, each, features, routes, l2=l2))
            for l2 in penalties
        }
        for name, each in usable.items()
    }, notes


@dataclass(frozen=True, slots=True)
class Classifier:
    """Linear weights over standardised features."""

    weight: Floats
    """[features, routes]"""
    bias: Floats
    mean: Floats
    scale: Floats

    def log_probs(self, features: Floats) -> Floats:
        """[rows, routes]"""
        return _log_softmax((features - self.mean) / self.scale @ self.weight + self.bias)


def fit_classifier(
    features: Floats, labels: Sequence[int | None], routes: int, *, l2: float = DEFAULT_L2, iterations: int = 2000
) -> Classifier:
    """Minimizes mean cross-entropy + l2/2·|w|²; rows without a label (None) are left out.

    Uses Nesterov's accelerated gradient with a step size from the curvature bound, so nothing needs tuning, and stops
    when the gradient is close to zero.
    """
    labelled = np.array([i for i, label in enumerate(labels) if label is not None], dtype=int)
    if not len(labelled):
        raise ConfigError("no labelled rows to fit the classifier to: label the training rows first")
    x = np.asarray(features, dtype=np.float64)[labelled]
    y = np.eye(routes)[[int(labels[i] or 0) for i in labelled]]
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    x = np.concatenate([(x - mean) / scale, np.ones((len(x), 1))], axis=1)
    shrink = np.append(np.full(x.shape[1] - 1, l2), 0.0)[:, None]
    step = 1 / (0.5 * _largest_eigenvalue(x) / len(x) + l2)  # the curvature of softmax is at most 1/2
    weight = lookahead = np.zeros((x.shape[1], routes))
    momentum = 1.0
    for _ in range(iterations):
        gradient = x.T @ (np.exp(_log_softmax(x @ lookahead)) - y) / len(x) + shrink * lookahead
        updated = lookahead - step * gradient
        if ((updated - weight) * gradient).sum() > 0:  # restart when momentum points uphill
            momentum = 1.0
        next_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        lookahead = updated + (momentum - 1) / next_momentum * (updated - weight)
        weight, momentum = updated, next_momentum
        if np.abs(gradient).max() < 1e-7:
            break
    return Classifier(weight[:-1], weight[-1], mean, scale)


def _largest_eigenvalue(x: Floats) -> float:
    """An upper estimate of the largest eigenvalue of xᵀx, by power iteration."""
    vector = np.asarray(np.random.default_rng(0).standard_normal(x.shape[1]))
    for _ in range(100):
        vector = np.asarray(x.T @ (x @ (vector / float(np.linalg.norm(vector)))))
    return 1.05 * float(np.linalg.norm(vector))


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
