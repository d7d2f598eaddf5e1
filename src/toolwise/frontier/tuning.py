"""Tunes baseline routers on rows that are not evaluated: training rows, if possible such that the router did not learn
from.

Every baseline has a fixed list of candidates. Each is held to the budgets on the tuning rows as the learned router is
on the evaluated ones: thresholds fitted on one half, scored on the other. The candidate with the highest mean score
over the budgets is evaluated; the others never are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from toolwise.agent.inference import TrainedRouter
from toolwise.frontier.baselines import CLASSIFIER, DEFAULT_L2, PENALTIES, classifier_candidates
from toolwise.frontier.confidence import CONFIDENCE, answer_confidences, confidence_candidates
from toolwise.frontier.prompted import PROMPTED, applicable_routes, prompted_candidates
from toolwise.frontier.rollout_pool import ALL_TOOLS, OutcomeTable
from toolwise.frontier.router_comparison import RouteValues, mean_score_at_budgets
from toolwise.routing.threshold import Ints
from toolwise.training.calibration import recorded_split
from toolwise.types import Task

MIN_TUNING_ROWS = 8
"""Fewer rows would choose at random."""
TUNING_DRAWS_SHARE = 4
"""A tuning row has this many times fewer rollouts per route than an evaluated one; at least one."""


def tuning_tasks(train: Sequence[Task], tasks: Sequence[Task], source: Path | None, count: int) -> list[Task]:
    """`count` of the training rows: first those that the run in `source` only calibrated on. Rows to evaluate are never
    among them."""
    if count < MIN_TUNING_ROWS:
        return []
    known = frozenset() if source is None else recorded_split(source) | recorded_split(source.resolve().parent.parent)
    evaluated = {task.task_id for task in tasks}
    usable = [task for task in train if task.task_id not in evaluated]
    chosen = sorted(usable, key=lambda task: task.task_id not in known)[:count]
    return chosen if len(chosen) >= MIN_TUNING_ROWS else []


async def baseline_routers(
    routing: TrainedRouter,
    train: Sequence[Task],
    tasks: Sequence[Task],
    tuning: Sequence[Task],
    outcomes: OutcomeTable | None,
    budgets: Sequence[float],
    *,
    seed: int = 0,
) -> tuple[dict[str, RouteValues], list[str]]:
    """Each baseline's route values for `tasks`, and notes: what was chosen, and why a baseline is missing.

    `train` are the rows to fit to, `tuning` those of them to tune on instead, and `outcomes` what came of the latter.
    Without them, there are only the classifiers, not tuned.
    """
    tuned = {task.task_id for task in tuning}
    rows, fitted = [*tuning, *tasks], [task for task in train if task.task_id not in tuned]
    penalties = PENALTIES if tuning else (DEFAULT_L2,)
    candidates, notes = classifier_candidates(routing, fitted, rows, penalties)
    if outcomes is None:
        return {name: values for name, each in candidates.items() for values in each.values()}, notes
    routes = [str(name) for name in routing.routes.names]
    columns = [*routes, ALL_TOOLS]

    def best_of(name: str) -> str:
        return choose_candidate(candidates[name], outcomes, budgets, routes, seed)

    if routing.routes.direct is None:
        notes.append("no confidence router: it needs a route without tools that the model itself answers")
    else:
        candidates[CONFIDENCE] = await _confidence_candidates(routing, candidates, rows, columns, best_of)
    candidates[PROMPTED] = await prompted_candidates(routing, rows, len(tuning))
    chosen = {name: best_of(name) for name in candidates}
    notes += [
        f"{name}: {best} (the best of {len(candidates[name])} on {len(tuning)} tuning rows)"
        for name, best in chosen.items()
    ]
    evaluated = np.arange(len(tuning), len(rows))
    return {name: candidates[name][best].select_rows(evaluated) for name, best in chosen.items()}, notes


async def _confidence_candidates(
    routing: TrainedRouter,
    candidates: Mapping[str, Mapping[str, RouteValues]],
    rows: Sequence[Task],
    columns: Sequence[str],
    best_of: Callable[[str], str],
) -> dict[str, RouteValues]:
    """The confidence-threshold router: with each other route, all tools at once, or the classifier's choice."""
    assert routing.routes.direct is not None
    direct = columns.index(routing.routes.direct)
    choices = {f"then {name}": np.full(len(rows), i) for i, name in enumerate(columns) if i != direct}
    if CLASSIFIER in candidates:
        choices["then the classifier's tools"] = _best_tools(candidates[CLASSIFIER][best_of(CLASSIFIER)], direct)
    # A route that does not apply to a row leaves it the direct answer.
    applies = np.c_[applicable_routes(routing, rows), np.ones(len(rows), bool)]
    choices = {name: np.where(applies[np.arange(len(rows)), each], each, direct) for name, each in choices.items()}
    return confidence_candidates(await answer_confidences(routing, rows), columns, choices, direct=direct)


def choose_candidate(
    candidates: Mapping[str, RouteValues],
    outcomes: OutcomeTable,
    budgets: Sequence[float],
    routes: Sequence[str],
    seed: int,
) -> str:
    """The candidate with the highest mean score over the budgets on the tuning rows, the first rows of each; the first
    of equals."""
    first = np.arange(len(outcomes.row_ids))
    scores = {
        name: mean_score_at_budgets(outcomes, values.select_rows(first), budgets, routes=routes, seed=seed)
        for name, values in candidates.items()
    }
    return max(scores, key=scores.__getitem__)


def _best_tools(values: RouteValues, direct: int) -> Ints:
    """The best route of each row other than the direct answer."""
    others = np.where(np.arange(values.values.shape[1]) == direct, -np.inf, values.values)
    return np.asarray(others.argmax(axis=1), dtype=np.int64)
