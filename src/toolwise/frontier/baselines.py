"""The classifiers that a learned router is compared with: who told them what each training row wants.

classifier         by labels, as a person can have them: those of the rows, else the heuristic's. Whoever labels reads
                   the question and its tools, and does not know what the model has in its memory
told the kinds     by the kind that the row's maker gave it, which says so: it is told what the router has to find out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolwise.agent.inference import TrainedRouter
from toolwise.errors import ConfigError
from toolwise.frontier.classifier import fit_classifier
from toolwise.frontier.comparison import RouteValues
from toolwise.frontier.outcomes import CLASSIFIER, ORACLE_LABELS
from toolwise.routing.actions import MIXED, ROUTES, RouteAction, Target
from toolwise.routing.families import families_of_task, heuristic_target
from toolwise.routing.learned_router import target_of
from toolwise.training.tasks import attach_labels, load_split
from toolwise.types import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from toolwise.tools.base import BaseTool

    Floats = NDArray[np.float64]

KIND_TARGETS: dict[str, Target] = {
    "known": RouteAction.ANSWER,
    "lookup": RouteAction.SEARCH_FAMILY,
    "arithmetic": RouteAction.CALCULATE_FAMILY,
    "two_step": MIXED,
}
"""The kinds of the demo's small world; rows of other kinds tell nothing."""
PROMPT_BATCH_SIZE = 256
"""Prompts that are read together."""


def targets_by_labels(tasks: Sequence[Task], tools: Mapping[str, BaseTool] | None = None) -> list[Target | None]:
    """What the rows' labels say; where not one row has a label, what `toolwise data label --heuristic` would."""
    known = [target_of(task) for task in tasks]
    if any(target is not None for target in known):
        return known
    return [heuristic_target(task, families_of_task(task, tools)) for task in tasks]


def targets_by_kinds(tasks: Sequence[Task]) -> list[Target | None]:
    return [KIND_TARGETS.get(str(task.extra_info.get("kind"))) for task in tasks]


def classifier_log_probs(seen: Floats, targets: Sequence[Target | None], asked: Floats) -> Floats:
    """Log-probs of the routes [rows, routes] by a classifier that saw features with their targets, MIXED left out."""
    wanted = [None if target is None or target == MIXED else RouteAction.parse(target).index for target in targets]
    return fit_classifier(seen, wanted, len(ROUTES)).log_probs(asked)


def baseline_routers(
    routing: TrainedRouter, train: Sequence[Task] | None, tasks: Sequence[Task]
) -> tuple[dict[str, RouteValues], list[str]]:
    """Each one's word on `tasks`, by the features that the head sees; and why one is missing.

    `train` is what they learn from: the run's own training rows, with its labels, where not given.
    """
    try:
        if train is None:
            train = attach_labels(routing.config, load_split(routing.config, "train", routing.config.data.limit))
    except ConfigError as fault:
        return {}, [f"no classifier: {fault}"]
    told = {CLASSIFIER: targets_by_labels(train, routing.tools), ORACLE_LABELS: targets_by_kinds(train)}
    usable = {name: each for name, each in told.items() if any(t not in (None, MIXED) for t in each)}
    notes = (
        []
        if CLASSIFIER in usable
        else ["no classifier: no training row has a label, nor gold calls to go by: run toolwise data label"]
    )
    if not usable:
        return {}, notes
    seen, asked = batched_features(routing, train), batched_features(routing, tasks)
    return {name: RouteValues(classifier_log_probs(seen, each, asked)) for name, each in usable.items()}, notes


def batched_features(routing: TrainedRouter, tasks: Sequence[Task]) -> Floats:
    import numpy as np

    return np.concatenate(
        [routing.features(tasks[i : i + PROMPT_BATCH_SIZE]) for i in range(0, len(tasks), PROMPT_BATCH_SIZE)]
    )
