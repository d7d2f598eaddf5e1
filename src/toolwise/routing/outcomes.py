"""The router's advantages for one step, from the rewards and costs of its rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolwise.config.router import RouterConfig
from toolwise.routing.actions import ROUTES
from toolwise.routing.reward_baselines import RunningBaseline
from toolwise.routing.route_advantages import independent_advantages, router_rewards, stratified_credit

RouteProbs = Mapping[str, Sequence[float]]
"""prompt id -> probability of each route"""


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    """A finished rollout."""

    prompt_id: str
    route: int
    reward: float
    """r_task"""
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RouterAdvantages:
    """The credit of one step."""

    route_advantages: Mapping[str, tuple[float | None, ...]]
    """For stratified routes: prompt id -> advantage of every route, None for a route without a rollout"""
    rollout_advantages: Sequence[float]
    """For routes sampled from the policy: one advantage per rollout."""
    spent: Mapping[str, Sequence[float]]
    """unit -> what the policy spends: per prompt for stratified routes, per rollout for sampled ones"""


def credit_routes(
    outcomes: Sequence[RouteOutcome],
    probs: RouteProbs,
    lambdas: Mapping[str, float],
    training: RouterConfig,
    baseline: RunningBaseline,
    units: Sequence[str],
) -> RouterAdvantages:
    """Advantages centred within the prompt, or against the running baseline if a prompt has nothing to compare (one
    route for all rollouts, or one rollout). Every step updates the baseline."""
    rewards, routes, groups = [c.reward for c in outcomes], [c.route for c in outcomes], [c.prompt_id for c in outcomes]
    costs = {unit: [c.costs[unit] for c in outcomes] for unit in units}
    net_rewards = router_rewards(rewards, costs, lambdas)
    control = training.divide_by_std
    if training.routes == "stratified":
        result = _stratified(net_rewards, costs, routes, groups, probs, control)
    elif training.routes == "one" or len(set(groups)) == len(groups):
        result = RouterAdvantages({}, baseline.advantages(rewards, costs, lambdas).tolist(), costs)
    else:
        rollout_advantages = independent_advantages(net_rewards, groups, divide_by_std_as_a_control=control)
        result = RouterAdvantages({}, rollout_advantages.tolist(), costs)
    baseline.update(rewards, costs)
    return result


def _stratified(
    net_rewards: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    costs: Mapping[str, Sequence[float]],
    routes: Sequence[int],
    groups: Sequence[str],
    probs: RouteProbs,
    control: bool,
) -> RouterAdvantages:
    prompt_ids = list(dict.fromkeys(groups))
    table = np.array([probs[p] for p in prompt_ids], dtype=np.float64).reshape(len(prompt_ids), len(ROUTES))
    credit = stratified_credit(net_rewards, costs, routes, groups, table, divide_by_std_as_a_control=control)
    route_advantages = {
        prompt_id: tuple(float(a) if seen else None for a, seen in zip(row, seen_routes, strict=True))
        for prompt_id, row, seen_routes in zip(prompt_ids, credit.advantages, credit.seen, strict=True)
    }
    return RouterAdvantages(
        route_advantages, [0.0] * len(routes), {unit: c.tolist() for unit, c in credit.policy_costs.items()}
    )


def policy_weights(outcomes: Sequence[RouteOutcome], probs: RouteProbs, routes: str) -> list[float]:
    """The weight of each rollout in the mean under the policy: π for stratified routes, equal for sampled ones."""
    if routes != "stratified":
        return [1.0] * len(outcomes)
    counts = Counter((c.prompt_id, c.route) for c in outcomes)
    seen: dict[str, float] = {}
    for prompt_id, route in counts:
        seen[prompt_id] = seen.get(prompt_id, 0.0) + probs[prompt_id][route]
    tiny = float(np.finfo(float).tiny)
    return [probs[c.prompt_id][c.route] / counts[c.prompt_id, c.route] / max(seen[c.prompt_id], tiny) for c in outcomes]
