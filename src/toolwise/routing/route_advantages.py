"""The router's credit: from what rollouts earned and cost to an advantage for each route taken, or for each route.

    r_router = r_task − Σ_u λ_u · cost_u
    independent routes   A_i = r_i − mean(r of its prompt)                  loss −E[log π_r(a_i|x) · A_i]
    stratified routes    A(x,a) = Q̂(x,a) − Σ_b π_r(b|x)·Q̂(x,b)              loss −E[Σ_a π_r(a|x) · A(x,a)]
                         Q̂(x,a): mean r_router of the rollouts of x that took a
    the policy's cost    ĉ(x) = Σ_a π_r(a|x)·ĉ(x,a)                          what the dual step sees

Advantages are centred and never divided by their deviation: where only cost differs, that division gives the same
advantage at λ = 0.001 and at λ = 5, and λ would do nothing. Statistics in float64, within a prompt: nothing outside
it can change them. Actors are credited elsewhere, on r_task alone, within (prompt, route).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toolwise.errors import ToolwiseError
from toolwise.routing.actions import MIXED, ROUTES

Doubles = NDArray[np.float64]
Ints = NDArray[np.intp]
Baseline = Literal["group", "leave_one_out"]


class RouterCreditError(ToolwiseError, ValueError):
    """Rewards, costs, routes and groups that do not fit together."""


def router_rewards(
    task_rewards: Sequence[float] | Doubles,
    costs: Mapping[str, Sequence[float] | Doubles],
    prices: Mapping[str, float],
) -> Doubles:
    """r_task − Σ λ·cost, a rollout each; units without a price cost nothing."""
    rewards = finite_array(task_rewards, "r_task")
    for unit, price in prices.items():
        if unit not in costs:
            raise RouterCreditError(f"λ has a price in {unit!r}, and costs are in {', '.join(costs) or 'nothing'}")
        rewards = rewards - price * finite_array(costs[unit], f"cost in {unit!r}", len(rewards))
    return rewards


def router_token_level_rewards(rewards: Sequence[float] | Doubles, response_mask: Any) -> Doubles:
    """[batch, length]: zeros but at each row's last sampled token, which carries its router reward.

    What `advantages.compute_grpo_outcome_advantage` takes, with `norm_by_std=False`.
    """
    mask = np.asarray(response_mask).astype(bool)
    given = finite_array(rewards, "router rewards", len(mask))
    placed = np.zeros(mask.shape)
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - np.argmax(mask[rows, ::-1], axis=1)
    placed[rows, last] = given[rows]
    return placed


def independent_advantages(
    rewards: Sequence[float] | Doubles,
    groups: Sequence[Hashable],
    *,
    baseline: Baseline = "group",
    divide_by_std_as_a_control: bool = False,
) -> Doubles:
    """One advantage a rollout, against its prompt's others. A prompt of one, or of equal rewards, gives exactly 0.

    `divide_by_std_as_a_control` exists to be seen to fail: it makes the router blind to λ.
    """
    r = finite_array(rewards, "router rewards", len(groups))
    advantages = np.zeros(len(r))
    for members in _group_indices(groups).values():
        x = r[members]
        if len(x) < 2 or bool((x == x[0]).all()):
            continue
        centred = x - x.mean()
        if baseline == "leave_one_out":
            centred *= len(x) / (len(x) - 1)
        if divide_by_std_as_a_control:
            centred /= x.std(ddof=1) + 1e-6
        advantages[members] = centred
    return advantages


@dataclass(frozen=True, slots=True)
class RouteCredit:
    """What each route of each prompt was worth; prompts in the order they first came, routes in that of `ROUTES`."""

    groups: tuple[Hashable, ...]
    seen: NDArray[np.bool_]
    """[prompts, routes] whether any rollout took it; what was not seen is nowhere counted."""
    q: Doubles
    """[prompts, routes] mean router reward; 0 where not seen"""
    advantages: Doubles
    """[prompts, routes] against the policy's own mean; 0 where not seen"""
    values: Doubles
    """[prompts] Σ π·Q̂"""
    route_costs: Mapping[str, Doubles]
    """unit -> [prompts, routes] mean cost; 0 where not seen"""
    policy_costs: Mapping[str, Doubles]
    """unit -> [prompts] Σ π·ĉ"""


def stratified_credit(
    rewards: Sequence[float] | Doubles,
    costs: Mapping[str, Sequence[float] | Doubles],
    routes: Sequence[int] | Ints,
    groups: Sequence[Hashable],
    probs: Any,
    *,
    divide_by_std_as_a_control: bool = False,
) -> RouteCredit:
    """From rollouts (router reward, costs, route index, prompt) and π_r(a|x) [prompts, routes] to credit for routes.

    π is taken over the routes that were seen: one that was not gets neither advantage nor, under the loss, gradient.
    """
    r = finite_array(rewards, "router rewards", len(groups))
    taken = np.asarray(routes, dtype=np.intp)
    if len(taken) != len(r) or (len(taken) and not 0 <= taken.min() <= taken.max() < len(ROUTES)):
        raise RouterCreditError(f"give one route from 0 to {len(ROUTES) - 1} for each of {len(r)} rollouts")
    places = _group_indices(groups)
    pi = np.asarray(probs, dtype=np.float64)
    if pi.shape != (len(places), len(ROUTES)):
        raise RouterCreditError(f"probs has shape {pi.shape}; {len(places)} prompts × {len(ROUTES)} routes are needed")
    prompt = np.empty(len(r), dtype=np.intp)
    for number, members in enumerate(places.values()):
        prompt[members] = number
    cell = prompt * len(ROUTES) + taken
    counts = np.bincount(cell, minlength=pi.size).reshape(pi.shape)
    seen = counts > 0

    def by_route(x: Doubles) -> Doubles:
        return np.asarray(np.bincount(cell, x, pi.size).reshape(pi.shape) / np.maximum(counts, 1))

    weights = np.where(seen, pi, 0.0)
    weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    # Against a reward of the prompt's own: rewards that are all equal then say exactly nothing.
    anchor = r[[members[0] for members in places.values()]]
    above = by_route(r - anchor[prompt])
    advantages = np.where(seen, above - (weights * above).sum(axis=1, keepdims=True), 0.0)
    q = np.where(seen, above + anchor[:, None], 0.0)
    values = (weights * q).sum(axis=1)
    if divide_by_std_as_a_control:
        advantages = advantages / (np.sqrt((weights * advantages**2).sum(axis=1, keepdims=True)) + 1e-6)
    route_costs = {unit: by_route(finite_array(c, f"cost in {unit!r}", len(r))) for unit, c in costs.items()}
    policy_costs = {unit: (weights * c).sum(axis=1) for unit, c in route_costs.items()}
    return RouteCredit(tuple(places), seen, q, advantages, values, route_costs, policy_costs)


def importance_weights(probs: Any, behavior_probs: Any, cap: float = 2.0) -> Doubles:
    """min(π_r/q, cap) for routes that were drawn with probabilities q and not by the policy."""
    q = np.asarray(behavior_probs, dtype=np.float64)
    if not (q > 0).all():
        raise RouterCreditError("a route was drawn whose probability is 0; give the probabilities it was drawn with")
    return np.asarray(np.minimum(np.asarray(probs, dtype=np.float64) / q, cap))


def mixed_share(targets: Sequence[Any]) -> float:
    """The share of MIXED rows among those that have a label."""
    labelled = [target for target in targets if target is not None]
    return sum(target == MIXED for target in labelled) / len(labelled) if labelled else 0.0


def _group_indices(groups: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    places: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return places


def finite_array(values: Any, what: str, length: int | None = None) -> Doubles:
    """A flat array of finite numbers, `length` of them, or a one-line error."""
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or (length is not None and len(found) != length):
        raise RouterCreditError(f"{what}: {found.shape} numbers where {length or 'a list of them'} is needed")
    if not np.isfinite(found).all():
        raise RouterCreditError(f"{what}: number {int(np.flatnonzero(~np.isfinite(found))[0])} is not finite")
    return found
