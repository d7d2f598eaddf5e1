"""Whether a run's budgets can be met at all, before its first step: a few tasks are rolled out under every route.

Prices of calls alone need no rollouts (training/diagnosis/preflight.py); what a route takes in tokens, seconds or calls
that only the text shows is known only then. Budgets can be met exactly if no weights λ ≥ 0 over their units make the
cheapest routes too dear (the minimax theorem):

    max over λ, Σ λ_u = 1, of the mean over tasks of min over routes of Σ_u λ_u · cost_u / limit_u   ≤ 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from toolwise.routing.cost import PricesCost, counts_written_calls
from toolwise.routing.inference_router import InferenceRouter
from toolwise.routing.threshold import Floats
from toolwise.routing.turn_router import TurnRouter
from toolwise.training.rollout_setup import RolloutSetup
from toolwise.types import Task

PROBE_TASKS = 16
TIGHTEST = 64.0
"""Nats: with this shift a router of turns takes the cheapest route everywhere."""
GRID = 50
"""Weights of two budgets are compared in steps of 1 / GRID."""


async def probe_budgets(setup: RolloutSetup, tasks: Sequence[Task]) -> str:
    """What to say about budgets that no routes meet; empty if there is nothing to say, or nothing to find out."""
    router, tasks = setup.router, tasks[:PROBE_TASKS]
    if not isinstance(router, InferenceRouter) or not router.budgets.limits or not tasks or _is_plain(router, tasks):
        return ""
    if isinstance(router, TurnRouter):
        decisions = router.decide_shifted(tasks, TIGHTEST, 0)
    else:
        decisions = router.decide_all(tasks, 0)
    rollouts = await setup.scheduler.roll_out(decisions, do_sample=setup.config.validation.do_sample)
    costs: dict[str, list[list[float]]] = {}
    failed: set[str] = set()
    """Prompts without a cost for each route: the one that failed may be the cheapest."""
    for decision, rollout in zip(decisions, rollouts, strict=True):
        spent = router.costs_of(rollout)
        costs.setdefault(decision.prompt_id, []).append([spent[unit] for unit in router.budgets.limits])
        if not rollout.trainable:
            failed.add(decision.prompt_id)
    whole = [np.array(rows) for prompt, rows in costs.items() if prompt not in failed]
    return describe_unmet(whole, router.config.lowest_limits)


def _is_plain(router: InferenceRouter, tasks: Sequence[Task]) -> bool:
    """Whether every task can be answered for nothing: a route without tools and price, where only calls cost."""
    meters = isinstance(router.cost, PricesCost) and any(map(router.cost.prices_meters, router.budgets.limits))
    free = any(not route.needs_tools and not any(route.price.values()) for route in router.routes)
    return not meters and free and not any(counts_written_calls(task, router.config.usage) for task in tasks)


def describe_unmet(tasks: Sequence[Floats], limits: Mapping[str, float]) -> str:
    """`tasks` have the costs [routes, units] of each task. Names a budget that the cheapest routes exceed by more than
    two standard errors, else budgets that exclude each other."""
    if not tasks:
        return ""
    units, bounds = list(limits), np.array(list(limits.values()))
    seen = f"measured on {len(tasks)} tasks before training"
    for index, unit in enumerate(units):
        least = np.array([rows[:, index].min() for rows in tasks])
        if least.mean() - 2 * _standard_error(least) > bounds[index] + 1e-9:
            return (
                f"the budget of {bounds[index]:g} in {unit!r} cannot be met: the cheapest routes cost "
                f"{least.mean():.3g} ({seen}); raise the limit, or add a cheaper route"
            )
    worst, spent, weights = 0.0, np.zeros(len(units)), tuple[float, ...]()
    for chosen in _weights(len(units)):
        scaled = np.array(chosen) / np.maximum(bounds, 1e-9)
        cheapest = [int((rows @ scaled).argmin()) for rows in tasks]
        prices = np.array([rows[route] @ scaled for rows, route in zip(tasks, cheapest, strict=True)])
        excess = float(prices.mean() - 2 * _standard_error(prices))
        if excess > worst:
            worst, weights = excess, chosen
            spent = np.mean([rows[route] for rows, route in zip(tasks, cheapest, strict=True)], axis=0)
    if worst <= 1 + 1e-9:
        return ""
    together = " and ".join(f"{bounds[i]:g} in {units[i]!r}" for i, weight in enumerate(weights) if weight)
    at = ", ".join(f"{spent[i]:.3g} in {units[i]!r}" for i, weight in enumerate(weights) if weight)
    return (
        f"the budgets of {together} cannot be met together: the routes that come nearest cost {at} ({seen}); raise a "
        "limit, or add a cheaper route"
    )


def _weights(units: int) -> list[tuple[float, ...]]:
    """Every pair of units in steps of 1 / GRID, and all alike."""
    chosen = [(1.0 / units,) * units]
    for first, second in itertools.combinations(range(units), 2):
        for step in range(1, GRID):
            share = step / GRID
            chosen.append(tuple(share if i == first else 1 - share if i == second else 0.0 for i in range(units)))
    return chosen


def _standard_error(values: Floats) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
