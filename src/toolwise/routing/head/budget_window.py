"""The last prompts of training with what each of their routes earned and cost (`router.budget_window`).

The prompts of one step are few and their mix is random, so their cost is a noisy measure of what the policy spends.
Stratified routes try every route of a prompt: what any policy would have spent on earlier prompts is known.

    mean     ĉ_u = mean over the window of Σ_a π(a|x)·c_u(x,a)             π: the head as it is now
    solved   λ* = argmin_{λ≥0} mean τ·log Σ_a exp((r(x,a) − Σ_u λ_u·c_u(x,a)) / τ) + Σ_u λ_u·B_u

λ* is the dual solution: the λ at which the best policy with entropy bonus τ, which is π ∝ exp((r − λ·c) / τ), meets the
budgets. The function is convex, and its gradient is budget minus cost. The controller (`routing/budget.py`) responds to
ĉ and follows the changes of λ*, such as those that come with the schedule of τ.

Rewards and costs are means over the rollouts of a route; those of an earlier actor are still in the window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolwise.routing.head.head import RouterHead
from toolwise.routing.samples import RouterExample

Floats = NDArray[np.float64]

MIN_TEMPERATURE = 1e-3
LIMIT_TOLERANCE = 1e-3
"""A budget counts as met at this share of the highest cost above it: a softmax never reaches a budget of 0."""
BISECTIONS, CYCLES, DOUBLINGS = 40, 20, 20


class BudgetWindow:
    """At most `size` prompts; the oldest are dropped."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._features = torch.zeros(0, 0)
        self._outcomes = np.zeros((0, 0, 0))
        """[prompts, routes, 1 + units] reward and costs; NaN for a route without a rollout."""

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, examples: Sequence[RouterExample]) -> None:
        """Only prompts whose routes were stratified, with a feature vector from a frozen trunk."""
        usable = [
            e for e in examples if e.advantages is not None and e.samples and e.prediction.head_inputs[1] is not None
        ]
        if not usable:
            return
        features = torch.stack([example.prediction.head_inputs[1] for example in usable])
        outcomes = np.stack([_route_means(example) for example in usable])
        if len(self):
            features = torch.cat([self._features.to(features.device), features])
            outcomes = np.concatenate([self._outcomes, outcomes])
        self._features, self._outcomes = features[-self.size :], outcomes[-self.size :]

    @torch.no_grad()
    def means(self, head: RouterHead, multipliers: Sequence[float]) -> list[float]:
        """What the head's policy spends, per unit."""
        logits = head.logits(head(self._features), multipliers).double().cpu().numpy()
        return [float(cost) for cost in _mean_costs(logits, self._outcomes[..., 1:])]

    def solve(self, limits: Sequence[float], temperature: float) -> list[float | None]:
        """λ* of each unit; None where no λ meets the budget."""
        return solve_multipliers(self._outcomes[..., 0], self._outcomes[..., 1:], limits, temperature)

    def state_dict(self) -> dict[str, Any]:
        return {"features": self._features, "outcomes": torch.from_numpy(self._outcomes)} if len(self) else {}

    def load_state_dict(self, state: Mapping[str, Tensor], device: Any) -> None:
        if state:
            self._features = state["features"].to(device)[-self.size :]
            self._outcomes = state["outcomes"].double().cpu().numpy()[-self.size :]


def _route_means(example: RouterExample) -> Floats:
    """[routes, 1 + units]"""
    routes = len(example.prediction.logprobs)
    index = np.array([sample.route for sample in example.samples])
    values = np.array([(sample.reward, *sample.costs) for sample in example.samples], dtype=np.float64)
    counts = np.bincount(index, minlength=routes).astype(np.float64)
    sums = np.stack([np.bincount(index, column, routes) for column in values.T], axis=1)
    return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1.0)[:, None], np.nan)


def _mean_costs(logits: Floats, costs: Floats) -> Floats:
    """[units] for the softmax of `logits` over the routes with a rollout; `costs` is [prompts, routes, units]."""
    masked = np.where(np.isnan(costs[..., 0]), -np.inf, logits)
    weights = np.exp(masked - masked.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray((weights[..., None] * np.nan_to_num(costs)).sum(axis=1).mean(axis=0))


def solve_multipliers(
    rewards: Floats, costs: Floats, limits: Sequence[float], temperature: float
) -> list[float | None]:
    """λ* from `rewards` [prompts, routes] and `costs` [prompts, routes, units], NaN where a route has no rollout.

    Coordinate descent: each λ is found by bisection with the others fixed, until none changes.
    """
    tau = max(temperature, MIN_TEMPERATURE)
    highest = np.nanmax(costs, axis=(0, 1))
    allowed = np.asarray(limits) + LIMIT_TOLERANCE * highest
    lambdas, reachable = np.zeros(len(limits)), np.ones(len(limits), dtype=bool)

    def cost_at(unit: int, value: float) -> float:
        trial = lambdas.copy()
        trial[unit] = value
        return float(_mean_costs((np.nan_to_num(rewards) - np.nan_to_num(costs) @ trial) / tau, costs)[unit])

    for _ in range(CYCLES if len(limits) > 1 else 1):
        before = lambdas.copy()
        for unit in range(len(limits)):
            if cost_at(unit, 0.0) <= allowed[unit]:
                lambdas[unit] = 0.0
                continue
            low, high = 0.0, 1.0 / float(highest[unit])
            for _ in range(DOUBLINGS):
                if cost_at(unit, high) <= allowed[unit]:
                    break
                low, high = high, 2.0 * high
            reachable[unit] = cost_at(unit, high) <= allowed[unit]
            if not reachable[unit]:
                lambdas[unit] = 0.0
                continue
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                low, high = (middle, high) if cost_at(unit, middle) > allowed[unit] else (low, middle)
            lambdas[unit] = high
        if np.abs(lambdas - before).max() <= 1e-6 * (1 + lambdas.max()):
            break
    return [float(value) if meets else None for value, meets in zip(lambdas, reachable, strict=True)]
