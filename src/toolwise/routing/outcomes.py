"""From what a step's rollouts earned and cost to the router's credit, however its routes were tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolwise.routing.actions import ROUTES
from toolwise.routing.options import RouterTraining, RouteSampling
from toolwise.routing.reward_baselines import RunningBaseline
from toolwise.routing.route_advantages import independent_advantages, router_rewards, stratified_credit

RouteProbs = Mapping[str, Sequence[float]]
"""prompt id -> chances of its routes"""


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    """A rollout that came back."""

    prompt_id: str
    route: int
    reward: float
    """r_task"""
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RouterAdvantages:
    """A step's credit."""

    route_advantages: Mapping[str, tuple[float | None, ...]]
    """prompt id -> advantage of every route, where they were stratified; None where nothing came back"""
    rollout_advantages: Sequence[float]
    """An advantage a rollout, where routes were drawn from the policy."""
    spent: Mapping[str, Sequence[float]]
    """unit -> what the policy spends: a prompt each where routes were stratified, a rollout each where drawn"""


def credit_routes(
    outcomes: Sequence[RouteOutcome],
    probs: RouteProbs,
    prices: Mapping[str, float],
    training: RouterTraining,
    baseline: RunningBaseline,
    units: Sequence[str],
) -> RouterAdvantages:
    """Centred within the prompt; against the running baseline, which takes all of it in, where that has nothing to
    compare: one route for all copies, or one copy."""
    rewards, routes, groups = [c.reward for c in outcomes], [c.route for c in outcomes], [c.prompt_id for c in outcomes]
    costs = {unit: [c.costs[unit] for c in outcomes] for unit in units}
    priced = router_rewards(rewards, costs, prices)
    control = training.divide_by_std_as_a_control
    if training.routes == "stratified":
        outcome = _stratified(priced, costs, routes, groups, probs, control)
    elif training.routes == "one" or len(set(groups)) == len(groups):
        outcome = RouterAdvantages({}, baseline.advantages(rewards, costs, prices).tolist(), costs)
    else:
        rollout_advantages = independent_advantages(priced, groups, divide_by_std_as_a_control=control)
        outcome = RouterAdvantages({}, rollout_advantages.tolist(), costs)
    baseline.update(rewards, costs)
    return outcome


def _stratified(
    priced: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    costs: Mapping[str, Sequence[float]],
    routes: Sequence[int],
    groups: Sequence[str],
    probs: RouteProbs,
    control: bool,
) -> RouterAdvantages:
    order = list(dict.fromkeys(groups))
    table = np.array([probs[p] for p in order], dtype=np.float64).reshape(len(order), len(ROUTES))
    credit = stratified_credit(priced, costs, routes, groups, table, divide_by_std_as_a_control=control)
    route_advantages = {
        prompt_id: tuple(float(a) if seen else None for a, seen in zip(row, known, strict=True))
        for prompt_id, row, known in zip(order, credit.advantages, credit.seen, strict=True)
    }
    return RouterAdvantages(
        route_advantages, [0.0] * len(routes), {unit: c.tolist() for unit, c in credit.policy_costs.items()}
    )


def policy_weights(outcomes: Sequence[RouteOutcome], probs: RouteProbs, routes: RouteSampling) -> list[float]:
    """What each rollout counts when the policy's own mean is wanted: stratified ones by π, drawn ones alike."""
    if routes != "stratified":
        return [1.0] * len(outcomes)
    counts = Counter((c.prompt_id, c.route) for c in outcomes)
    seen: dict[str, float] = {}
    for prompt_id, route in counts:
        seen[prompt_id] = seen.get(prompt_id, 0.0) + probs[prompt_id][route]
    tiny = float(np.finfo(float).tiny)
    return [probs[c.prompt_id][c.route] / counts[c.prompt_id, c.route] / max(seen[c.prompt_id], tiny) for c in outcomes]
