"""The router's advantages, per rollout or per route, from the rewards and costs of rollouts.

    r_router = r_task − Σ_u λ_u · cost_u
    independent routes   A_i = r_i − mean(r of its prompt)                  loss −E[log π_r(a_i|x) · A_i]
    stratified routes    A(x,a) = Q̂(x,a) − Σ_b π_r(b|x)·Q̂(x,b)              loss −E[Σ_a π_r(a|x) · A(x,a)]
                         Q̂(x,a): mean r_router of the rollouts of x that took a
    expected cost        ĉ(x) = Σ_a π_r(a|x)·ĉ(x,a)                          input of the dual step

Advantages are centred but never divided by their standard deviation: where only cost differs, that would give the same
advantage at λ = 0.001 and at λ = 5, and λ would have no effect. Statistics are float64 and within a prompt, independent
of other prompts. The actor's advantages are computed elsewhere, from r_task alone, within (prompt, route).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolwise.advantages.arrays import CreditError, Doubles, integer_codes, normalize
from toolwise.routing.families import ROUTES


def router_rewards(
    task_rewards: Sequence[float] | Doubles,
    costs: Mapping[str, Sequence[float] | Doubles],
    lambdas: Mapping[str, float],
) -> Doubles:
    """r_task − Σ λ·cost per rollout; units without a λ cost nothing."""
    rewards = finite_array(task_rewards, "r_task")
    for unit, lambda_ in lambdas.items():
        rewards = rewards - lambda_ * finite_array(costs[unit], f"cost in {unit!r}", len(rewards))
    return rewards


def router_token_level_rewards(rewards: Sequence[float] | Doubles, response_mask: Any) -> Doubles:
    """[batch, length]: the router reward at each row's last sampled token, zeros elsewhere.

    Input for `advantages.compute_grpo_outcome_advantage` with `norm_by_std=False`.
    """
    mask = np.asarray(response_mask).astype(bool)
    values = finite_array(rewards, "router rewards", len(mask))
    token_rewards = np.zeros(mask.shape)
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - np.argmax(mask[rows, ::-1], axis=1)
    token_rewards[rows, last] = values[rows]
    return token_rewards


def independent_advantages(
    rewards: Sequence[float] | Doubles,
    groups: Sequence[Hashable],
    *,
    divide_by_std_as_a_control: bool = False,
) -> Doubles:
    """One advantage per rollout, relative to its prompt. A single rollout, or equal rewards, give exactly 0.

    `divide_by_std_as_a_control` is a negative control: it makes the router insensitive to λ.
    """
    r = finite_array(rewards, "router rewards", len(groups))
    return normalize(r, integer_codes(list(groups)), "mean_std_norm" if divide_by_std_as_a_control else "mean_norm")


@dataclass(frozen=True, slots=True)
class RouteCredit:
    """The value of each route of each prompt; prompts in order of first occurrence, routes in that of `ROUTES`."""

    seen: NDArray[np.bool_]
    """[prompts, routes] whether any rollout took the route; others count nowhere."""
    advantages: Doubles
    """[prompts, routes] relative to the mean under the policy; 0 if not seen"""
    policy_costs: Mapping[str, Doubles]
    """unit -> [prompts] Σ π·ĉ"""


def stratified_credit(
    rewards: Sequence[float] | Doubles,
    costs: Mapping[str, Sequence[float] | Doubles],
    routes: Sequence[int] | NDArray[np.intp],
    groups: Sequence[Hashable],
    probs: Any,
    *,
    divide_by_std_as_a_control: bool = False,
) -> RouteCredit:
    """Credit of each route from rollouts (router reward, costs, route index, prompt) and π_r(a|x) [prompts, routes].

    π is renormalized over the routes that were seen; the others get no advantage and, under the loss, no gradient.
    """
    r = finite_array(rewards, "router rewards", len(groups))
    route = np.asarray(routes, dtype=np.intp)
    if len(route) != len(r) or (len(route) and not 0 <= route.min() <= route.max() < len(ROUTES)):
        raise CreditError(f"give one route from 0 to {len(ROUTES) - 1} for each of {len(r)} rollouts")
    prompt = integer_codes(list(groups))
    first_rollouts = np.unique(prompt, return_index=True)[1]
    pi = np.asarray(probs, dtype=np.float64)
    if pi.shape != (len(first_rollouts), len(ROUTES)):
        raise CreditError(f"probs has shape {pi.shape}; expected {len(first_rollouts)} prompts × {len(ROUTES)} routes")
    cell = prompt * len(ROUTES) + route
    counts = np.bincount(cell, minlength=pi.size).reshape(pi.shape)
    seen = counts > 0

    def by_route(x: Doubles) -> Doubles:
        return np.asarray(np.bincount(cell, x, pi.size).reshape(pi.shape) / np.maximum(counts, 1))

    weights = np.where(seen, pi, 0.0)
    weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    # Relative to one of the prompt's rewards, so that equal rewards give advantages of exactly 0.
    relative = by_route(r - r[first_rollouts][prompt])
    advantages = np.where(seen, relative - (weights * relative).sum(axis=1, keepdims=True), 0.0)
    if divide_by_std_as_a_control:
        advantages = advantages / (np.sqrt((weights * advantages**2).sum(axis=1, keepdims=True)) + 1e-6)
    policy_costs = {
        unit: (weights * by_route(finite_array(c, f"cost in {unit!r}", len(r)))).sum(axis=1)
        for unit, c in costs.items()
    }
    return RouteCredit(seen, advantages, policy_costs)


def finite_array(values: Any, what: str, length: int | None = None) -> Doubles:
    """A 1-D float64 array of finite numbers with `length` entries; raises otherwise."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or (length is not None and len(array) != length):
        raise CreditError(f"{what}: got shape {array.shape}, expected {length or 'a flat list'}")
    if not np.isfinite(array).all():
        raise CreditError(f"{what}: entry {int(np.flatnonzero(~np.isfinite(array))[0])} is not finite")
    return array
