"""Classifiers that a learned router is compared with. They differ in where the labels of the training rows come from.

classifier      labels that a labeller could provide: those of the rows, else the heuristic's. A labeller reads the
                question and its tools, but does not know what the model has memorized
oracle labels   `extra_info.oracle_route`, set by the author of the rows, who does know: what the router has to find out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from toolwise.agent.inference import TrainedRouter
from toolwise.errors import ConfigError
from toolwise.frontier.classifier import fit_classifier
from toolwise.frontier.comparison import RouteValues
from toolwise.frontier.names import CLASSIFIER, ORACLE_LABELS
from toolwise.routing.actions import MIXED, ROUTES, RouteAction, Target, parse_target
from toolwise.routing.families import families_of_task, heuristic_target
from toolwise.routing.learned_router import target_of
from toolwise.routing.threshold import Floats
from toolwise.tools.base import BaseTool
from toolwise.training.tasks import attach_labels, load_split
from toolwise.types import Task

ORACLE_ROUTE_KEY = "oracle_route"
"""In `extra_info`: the best route for the row (or MIXED), where the author of the rows knows it."""
PROMPT_BATCH_SIZE = 256
"""Prompts encoded together."""


def targets_by_labels(tasks: Sequence[Task], tools: Mapping[str, BaseTool] | None = None) -> list[Target | None]:
    """The labels of the rows; if no row has one, those that `toolwise data label --heuristic` would give."""
    labels = [target_of(task) for task in tasks]
    if any(target is not None for target in labels):
        return labels
    return [heuristic_target(task, families_of_task(task, tools)) for task in tasks]


def targets_by_oracle(tasks: Sequence[Task]) -> list[Target | None]:
    """The oracle's route of each row; None for rows without one."""
    written = [task.extra_info.get(ORACLE_ROUTE_KEY) for task in tasks]
    return [None if route is None else parse_target(route) for route in written]


def classifier_log_probs(train_features: Floats, targets: Sequence[Target | None], features: Floats) -> Floats:
    """Route log-probs [rows, routes] for `features`, from a classifier fitted to `targets`. MIXED rows are left out."""
    labels = [None if target is None or target == MIXED else RouteAction.parse(target).index for target in targets]
    return fit_classifier(train_features, labels, len(ROUTES)).log_probs(features)


def baseline_routers(
    routing: TrainedRouter, train: Sequence[Task] | None, tasks: Sequence[Task]
) -> tuple[dict[str, RouteValues], list[str]]:
    """Each baseline's route values for `tasks`, from the same features as the head's, and why a baseline is missing.

    `train` are the rows they are fitted to; by default the run's training rows, with its labels.
    """
    try:
        if train is None:
            train = attach_labels(routing.config, load_split(routing.config, "train", routing.config.data.limit))
    except ConfigError as error:
        return {}, [f"no classifier: {error}"]
    targets = {CLASSIFIER: targets_by_labels(train, routing.tools), ORACLE_LABELS: targets_by_oracle(train)}
    usable = {name: each for name, each in targets.items() if any(t not in (None, MIXED) for t in each)}
    notes = (
        []
        if CLASSIFIER in usable
        else ["no classifier: no training row has a label or gold calls; label them with toolwise data label"]
    )
    if not usable:
        return {}, notes
    train_features, features = batched_features(routing, train), batched_features(routing, tasks)
    return {
        name: RouteValues(classifier_log_probs(train_features, each, features)) for name, each in usable.items()
    }, notes


def batched_features(routing: TrainedRouter, tasks: Sequence[Task]) -> Floats:
    return np.concatenate(
        [routing.features(tasks[i : i + PROMPT_BATCH_SIZE]) for i in range(0, len(tasks), PROMPT_BATCH_SIZE)]
    )
