"""The calibration tasks of a run with budgets: set aside before training, and rolled out at each validation to fit the
thresholds that deliver the trained budgets (routing/calibration.py)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolwise.config.schema import RunConfig
from toolwise.data.task_set import set_aside
from toolwise.errors import ConfigError
from toolwise.protocols import Metrics, Router
from toolwise.routing.calibration import BudgetCalibration, CalibrationTable, calibrate_budgets, values_and_costs
from toolwise.routing.cost import PricesCost, RouteUsage
from toolwise.routing.delivered_budget import DeliveredBudget, format_cost, is_within
from toolwise.routing.inference_router import InferenceRouter
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.threshold import Floats
from toolwise.routing.turn_router import TurnRouter
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text
from toolwise.training.checkpoint import OVERSPEND
from toolwise.training.evaluate import score
from toolwise.training.rollout_setup import RolloutSetup
from toolwise.training.turn_calibration import calibrate_turn_router
from toolwise.types import RouteDecision, ScoredRollout, Task

log = logging.getLogger("toolwise")

CALIBRATION_FILE = "calibration.json"
MIN_ROWS, MAX_ROWS = 64, 4096
"""Bounds of the calibration tasks; beyond the upper one, their standard error hardly matters."""
MAX_SHARE_OF_FEW = 0.25
"""The minimum may take at most this share of the tasks; with fewer tasks nothing is set aside."""


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """Training tasks to learn from, and tasks that are only calibrated on."""

    train: Sequence[Task]
    calibration: Sequence[Task]
    note: str = ""
    """Why there are no calibration tasks although there are budgets."""


def split_tasks(config: RunConfig, tasks: Sequence[Task]) -> TaskSplit:
    """Sets aside `router.calibration` of the tasks, chosen by the run's seed. Without a router with budgets, none."""
    router, total = config.router, len(tasks)
    if not (router.enable and router.budgets):
        return TaskSplit(tasks, ())
    sampled = "the router is not calibrated, so what it delivers may exceed its budgets"
    if not router.calibration:
        return TaskSplit(tasks, (), f"router.calibration is 0: {sampled}")
    if total * MAX_SHARE_OF_FEW < MIN_ROWS:
        least = math.ceil(MIN_ROWS / MAX_SHARE_OF_FEW)
        return TaskSplit(tasks, (), f"{total} training tasks are too few to set some aside (use {least}): {sampled}")
    count = min(max(round(router.calibration * total), MIN_ROWS), MAX_ROWS)
    batch_size, left = config.data.batch_size, total - count
    if left < batch_size:
        raise ConfigError(
            f"router.calibration {router.calibration:g} sets {count} of {total} training tasks aside, which leaves "
            f"{left}, fewer than data.batch_size {batch_size}: lower router.calibration, or add tasks"
        )
    chosen = set(Random(f"calibration split/{config.seed}").sample(range(total), count))
    return TaskSplit(*set_aside(tasks, chosen))


def expected_errors(router: InferenceRouter, tasks: Sequence[Task]) -> dict[str, float]:
    """unit -> the standard error of the delivered cost if each prompt makes one call or none, at the price of the most
    expensive tool. Without units that also price tokens or seconds: how many a prompt takes is not known before."""
    errors = {}
    for unit, limit in router.budgets.limits.items():
        if isinstance(router.cost, PricesCost) and router.cost.prices_meters(unit):
            continue
        prices = [limit, *(route.price.get(unit, 0.0) for route in router.routes)]
        for task in tasks[:MIN_ROWS]:
            families = router.conditioning.families_of(task)
            prices += [router.cost(RouteUsage.of({tool: 1}, families))[unit] for tool in families]
        errors[unit] = math.sqrt(limit * (max(prices) - limit) / len(tasks))
    return errors


def begin_calibration(setup: RolloutSetup, split: TaskSplit, out: Path) -> str:
    """Records the calibration tasks in the run's folder; returns what to say about them."""
    router, tasks = setup.router, split.calibration
    if not isinstance(router, InferenceRouter) or not tasks:
        return split.note
    write_atomic(out / CALIBRATION_FILE, json_text({"task_ids": [task.task_id for task in tasks]}, indent=1).encode())
    errors, limits = expected_errors(router, tasks).items(), router.budgets.limits
    shown = ", ".join(
        f"{unit} {limits[unit]:g} ± {format_cost(error, limits[unit])} (standard error)" for unit, error in errors
    )
    expected = f"; expected if a prompt makes one call or none: {shown}" if shown else ""
    rollouts = min(setup.config.router.calibration_rollouts, len(tasks))
    how = "under every route"
    if isinstance(router, TurnRouter):
        how = f"up to {router.config.calibration_passes} times"
    if router.bins is not None and router.config.budget_prompt:  # as in `_calibrated_bins`
        how += f" ({rollouts // len(router.bins)} for each of the {len(router.bins)} budgets that agents are told)"
    return (
        f"calibration: {len(tasks)} of {len(split.train) + len(tasks)} training tasks are set aside, {rollouts} of "
        f"them rolled out {how} at the end, a third before{expected}"
    )


def recorded_split(run: Path) -> frozenset[str]:
    """The ids of the tasks that a run calibrated on; empty if it did not."""
    try:
        return frozenset(json.loads((run / CALIBRATION_FILE).read_text(encoding="utf-8"))["task_ids"])
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


async def calibrate_run(setup: RolloutSetup, tasks: Sequence[Task], *, step: int) -> tuple[Metrics, str]:
    """Calibrates with the weights of `step`; returns metrics and, if the budgets cannot be met, a warning. Before
    training there is nothing to calibrate: all routes are equal."""
    router = setup.router
    if not isinstance(router, InferenceRouter) or not tasks or not step:
        return {}, ""
    rollouts, last = setup.config.router.calibration_rollouts, step >= setup.config.trainer.total_steps
    met_before = not any(map(infeasible, _calibrations(router)))
    count = rollouts if last else math.ceil(rollouts / 3)
    latest: DeliveredBudget | None
    if isinstance(router, TurnRouter):
        latest = await calibrate_turn_router(setup, router, tasks, count, step=step)
    else:
        latest = await calibrate(setup, router, tasks, count, step=step)
    if latest is None:
        return {}, ""
    metrics = {"calibration/score": latest.score}
    for unit, cost, error in zip(latest.units, latest.costs, latest.standard_errors, strict=True):
        metrics |= {f"calibration/{unit}/cost": cost, f"calibration/{unit}/stderr": error}
    unmet = (text for text in map(infeasible, _calibrations(router)) if text)
    return metrics, next(unmet, "") if met_before else ""


def _calibrations(router: InferenceRouter) -> Sequence[DeliveredBudget]:
    """That of the budgets, or of each random budget, the lowest first."""
    if router.bins is not None and router.bins.calibrations:
        return router.bins.calibrations
    return () if router.calibration is None else (router.calibration,)


async def calibrate(
    setup: RolloutSetup, router: InferenceRouter, tasks: Sequence[Task], rollouts: int, *, step: int
) -> BudgetCalibration | None:
    """Fits the router's thresholds to its budgets on `tasks`, `rollouts` of which are rolled out under every route, and
    puts them into use; replies are decoded as in validation. None if no task could be rolled out and scored under every
    route: the previous thresholds stay."""
    predictions = router.predict_delivered(tasks)
    readable = [index for index, prediction in enumerate(predictions) if prediction is not None]
    chosen = readable[:rollouts]
    bins = _calibrated_bins(router, len(chosen))
    decisions = router.decide_all([tasks[index] for index in chosen], step, bins)
    finished = await setup.scheduler.roll_out(decisions, do_sample=setup.config.validation.do_sample)
    scored = await score(setup, finished, step=step)
    limits = router.budgets.limits
    spent, scores, usable = _outcomes(router, len(chosen), decisions, scored)
    complete = np.flatnonzero(usable.all(axis=1))
    if not len(complete):
        log.warning(
            "step %d: no calibration task was scored under every route, so the budgets are not calibrated", step
        )
        return None
    known = [prediction for prediction in predictions if prediction is not None]
    fit = partial(_fit_thresholds, known, spent, scores)
    if router.bins is None:
        router.calibration = fit(complete, limits, step=step)
        return router.calibration
    # Where the agent is told its budget, what it spends on a route depends on it: those rollouts count for it alone.
    fitted = []
    for index, value in enumerate(router.bins.values):
        rows = complete if bins is None else complete[[bins[row] == index for row in complete]]
        at = limits | {router.bins.unit: value}
        fitted.append(fit(rows if len(rows) else complete, at, bin=index, step=step))
    router.bins.calibrations = tuple(fitted)
    router.calibration = fitted[router.bins.values.index(router.bins.default)]
    return router.calibration


def _calibrated_bins(router: InferenceRouter, tasks: int) -> list[int] | None:
    """The random budget that each task is rolled out with, if the agent is told it."""
    if router.bins is None or not router.config.budget_prompt:
        return None
    return [index % len(router.bins) for index in range(tasks)]


def _fit_thresholds(
    predictions: Sequence[RoutePrediction],
    spent: Floats,
    scores: Floats,
    rolled_out: NDArray[np.int64],
    limits: Mapping[str, float],
    *,
    step: int,
    bin: int | None = None,
) -> BudgetCalibration:
    values, costs = zip(*(values_and_costs(prediction.at(bin)) for prediction in predictions), strict=True)
    table = CalibrationTable(
        values=np.stack(values),
        predicted=None if costs[0] is None else np.stack(costs),
        rolled_out=rolled_out,
        spent=spent[rolled_out],
        scores=scores[rolled_out],
    )
    return calibrate_budgets(table, limits, step=step)


def _outcomes(
    router: InferenceRouter, tasks: int, decisions: Sequence[RouteDecision], scored: Sequence[ScoredRollout]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Costs [tasks, routes, units], scores and whether there is a usable rollout [tasks, routes], of one rollout for
    each decision. A route that does not apply counts as usable, at no cost."""
    limits, shape = router.budgets.limits, (tasks, len(router.routes))
    spent, scores, usable = np.zeros((*shape, len(limits))), np.zeros(shape), np.ones(shape, dtype=bool)
    rows = {prompt_id: row for row, prompt_id in enumerate(dict.fromkeys(d.prompt_id for d in decisions))}
    for decision, s in zip(decisions, scored, strict=True):
        cell = rows[decision.prompt_id], router.routes.index(decision.route or "")
        costs = router.costs_of(s.rollout)
        spent[cell] = [costs[unit] for unit in limits]
        scores[cell] = s.score if s.result.has_valid_score else 0.0
        usable[cell] = s.result.has_valid_score and s.rollout.trainable
    return spent, scores, usable


def budget_metrics(router: Router, scored: Sequence[ScoredRollout]) -> Metrics:
    """Of a validation: how far it exceeded the router's budgets, and what it spent in each. Where checkpoints are
    compared, `budget/NAME` replaces the metric NAME."""
    overspend = router.overspend(scored)
    metrics = {} if overspend is None else {OVERSPEND: overspend}
    return metrics | (router.budget_metrics(scored) if isinstance(router, InferenceRouter) else {})


def infeasible(calibration: DeliveredBudget) -> str:
    """Names the budgets that no routes meet, and what the cheapest ones cost; empty if there are none."""
    entries = zip(
        calibration.units, calibration.limits, calibration.costs, calibration.least or calibration.costs, strict=True
    )
    over = [
        f"the budget of {limit:g} in {unit!r} cannot be met: the cheapest routes cost {format_cost(least, limit)}; "
        "raise the limit"
        for unit, limit, cost, least in entries
        if not is_within(cost, limit)
    ]
    return "; ".join(over)


def calibration_summary(router: Any, tasks: Sequence[Task]) -> Mapping[str, Any] | None:
    """For summary.json: the split, and what the latest calibration measured."""
    if not isinstance(router, InferenceRouter) or not tasks:
        return None
    summary: dict[str, Any] = {"tasks": len(tasks), "expected_standard_errors": expected_errors(router, tasks)}
    if (latest := router.calibration) is None:
        return summary
    return summary | {
        "step": latest.step,
        "rolled_out": latest.rolled_out,
        "feasible": latest.feasible,
        "score": latest.score,
        "units": {
            unit: {"limit": limit, "cost": cost, "standard_error": error}
            for unit, limit, cost, error in zip(
                latest.units, latest.limits, latest.costs, latest.standard_errors, strict=True
            )
        },
    }
