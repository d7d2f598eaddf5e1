"""The router's advantages for one step, per rollout or per route, from the rewards and costs of its rollouts.

    r_router = r_task − Σ_u λ_u · cost_u
    independent routes   A_i = r_i − mean(r of its prompt)                  loss −E[log π_r(a_i|x) · A_i]
    stratified routes    A(x,a) = Q̂(x,a) − Σ_b π_r(b|x)·Q̂(x,b)              loss −E[Σ_a π_r(a|x) · A(x,a)]
                         Q̂(x,a): mean r_router of the rollouts of x that took a
    expected cost        ĉ(x) = Σ_a π_r(a|x)·ĉ(x,a)                          input of the dual step

Advantages are centred but never divided by their standard deviation: where only cost differs, that would give the same
advantage at λ = 0.001 and at λ = 5, and λ would have no effect. Statistics are float64 and within a prompt, independent
of other prompts. The actor's advantages are computed elsewhere, from r_task alone, within (prompt, route).

Where a prompt has nothing to compare, A = (r_task − b_task) − Σ_u λ_u (cost_u − b_u), with running means b over earlier
batches: separate ones for r_task and each cost, because a mean of r_task − λ·cost would contain old values of λ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolwise.advantages.arrays import CreditError, Doubles, integer_codes, normalize
from toolwise.config.router import RouterConfig
from toolwise.routing.families import ROUTES

RouteProbs = Mapping[str, Sequence[float]]
"""prompt id -> probability of each route"""


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
    """The value of each route of each prompt; prompts in order of first occurrence, routes in that of the logits."""

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
    route_count: int = len(ROUTES),
    divide_by_std_as_a_control: bool = False,
) -> RouteCredit:
    """Credit of each route from rollouts (router reward, costs, route index, prompt) and π_r(a|x) [prompts, routes].

    π is renormalized over the routes that were seen; the others get no advantage and, under the loss, no gradient.
    """
    r = finite_array(rewards, "router rewards", len(groups))
    route = np.asarray(routes, dtype=np.intp)
    prompt = integer_codes(list(groups))
    first_rollouts = np.unique(prompt, return_index=True)[1]
    pi = np.asarray(probs, dtype=np.float64)
    if len(route) != len(r) or (len(route) and not 0 <= route.min() <= route.max() < route_count):
        raise CreditError(f"give one route from 0 to {route_count - 1} for each of {len(r)} rollouts")
    if pi.shape != (len(first_rollouts), route_count):
        raise CreditError(f"probs has shape {pi.shape}; expected {len(first_rollouts)} prompts × {route_count} routes")
    cell = prompt * route_count + route
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


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    prompt_id: str
    route: int
    reward: float
    """r_task"""
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RouterAdvantages:
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
    count = len(next(iter(probs.values()), ()))
    sampling = training.sampling_of(count)
    if sampling == "stratified":
        prompt_ids = list(dict.fromkeys(groups))
        table = np.array([probs[p] for p in prompt_ids], dtype=np.float64).reshape(len(prompt_ids), count)
        credit = stratified_credit(
            net_rewards, costs, routes, groups, table, route_count=count, divide_by_std_as_a_control=control
        )
        route_advantages = {
            prompt_id: tuple(float(a) if seen else None for a, seen in zip(row, seen_routes, strict=True))
            for prompt_id, row, seen_routes in zip(prompt_ids, credit.advantages, credit.seen, strict=True)
        }
        policy_costs = {unit: c.tolist() for unit, c in credit.policy_costs.items()}
        result = RouterAdvantages(route_advantages, [0.0] * len(routes), policy_costs)
    else:
        if sampling == "one" or len(set(groups)) == len(groups):
            advantages = baseline.advantages(rewards, costs, lambdas)
        else:
            advantages = independent_advantages(net_rewards, groups, divide_by_std_as_a_control=control)
        result = RouterAdvantages({}, advantages.tolist(), costs)
    baseline.update(rewards, costs)
    return result


def merge_advantages(parts: Sequence[tuple[Sequence[int], RouterAdvantages]], units: Sequence[str]) -> RouterAdvantages:
    """The advantages of all rollouts from those of parts of them, each with the indices of its rollouts."""
    by_rollout = {i: a for indices, part in parts for i, a in zip(indices, part.rollout_advantages, strict=True)}
    return RouterAdvantages(
        {prompt_id: row for _, part in parts for prompt_id, row in part.route_advantages.items()},
        [by_rollout[index] for index in sorted(by_rollout)],
        {unit: [cost for _, part in parts for cost in part.spent[unit]] for unit in units},
    )


def policy_weights(outcomes: Sequence[RouteOutcome], probs: RouteProbs, sampling: str) -> list[float]:
    """The weight of each rollout in the mean under the policy: π for stratified routes, equal for sampled ones."""
    if sampling != "stratified":
        return [1.0] * len(outcomes)
    counts = Counter((c.prompt_id, c.route) for c in outcomes)
    seen = dict.fromkeys(probs, 0.0)
    for prompt_id, route in counts:
        seen[prompt_id] += probs[prompt_id][route]
    tiny = float(np.finfo(float).tiny)
    return [probs[c.prompt_id][c.route] / counts[c.prompt_id, c.route] / max(seen[c.prompt_id], tiny) for c in outcomes]


class RunningBaseline:
    """Exponential moving averages of r_task and of each cost, bias-corrected; saved in checkpoints."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self._means: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def advantages(
        self,
        task_rewards: Sequence[float] | Doubles,
        costs: Mapping[str, Sequence[float] | Doubles],
        lambdas: Mapping[str, float],
    ) -> Doubles:
        """Advantages against the current means, without this batch (`update` adds it later), so that no sample is in
        its own baseline. Before the first update, uses the batch's mean."""
        rewards = finite_array(task_rewards, "r_task")
        result = rewards - self._mean("task", rewards)
        for unit, lambda_ in lambdas.items():
            unit_costs = finite_array(costs[unit], f"cost in {unit!r}", len(rewards))
            result = result - lambda_ * (unit_costs - self._mean(f"cost/{unit}", unit_costs))
        return result

    def update(self, task_rewards: Sequence[float] | Doubles, costs: Mapping[str, Sequence[float] | Doubles]) -> None:
        for name, values in {"task": task_rewards, **{f"cost/{unit}": c for unit, c in costs.items()}}.items():
            batch = finite_array(values, name)
            if len(batch):
                self._means[name] = self.decay * self._means.get(name, 0.0) + (1 - self.decay) * float(batch.mean())
                self._weights[name] = self.decay * self._weights.get(name, 0.0) + (1 - self.decay)

    def _mean(self, name: str, batch: Doubles) -> float:
        if name in self._means:
            return self._means[name] / self._weights[name]
        return float(batch.mean()) if len(batch) else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self._means), "weights": dict(self._weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means, self._weights = dict(state["means"]), dict(state["weights"])


class KindStandardizer:
    """Standardizes r_task within each kind of row, over everything seen of that kind; saved in checkpoints.

    It changes which rows a tight budget sacrifices: leave it off for frontiers.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}
        """kind -> [count, mean, sum of squared deviations]"""

    def __call__(self, task_rewards: Sequence[float] | Doubles, kinds: Sequence[str]) -> Doubles:
        """Adds the batch to the statistics, then standardizes it; 0 for a kind that has not varied yet."""
        rewards = finite_array(task_rewards, "r_task", len(kinds))
        for kind, reward in zip(kinds, rewards.tolist(), strict=True):
            count, old_mean, squares = self._seen.get(kind, [0.0, 0.0, 0.0])
            mean = old_mean + (reward - old_mean) / (count + 1)
            self._seen[kind] = [count + 1, mean, squares + (reward - old_mean) * (reward - mean)]
        return np.array([self._standardize(r, kind) for r, kind in zip(rewards.tolist(), kinds, strict=True)])

    def _standardize(self, reward: float, kind: str) -> float:
        count, mean, squares = self._seen[kind]
        deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
        return (reward - mean) / deviation if deviation > 1e-9 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {kind: list(seen) for kind, seen in self._seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {kind: list(seen) for kind, seen in state.items()}
