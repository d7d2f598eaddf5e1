"""Running baselines for prompts with a single rollout, and standardization of rewards within kinds of rows.

r_task and each cost have separate baselines: λ changes, and one of r_task − λ·cost would contain old values of λ.

    A = (r_task − b_task) − Σ_u λ_u (cost_u − b_u)        b: running means over earlier batches
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toolwise.routing.route_advantages import Doubles, finite_array


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
            count, mean, squares = self._seen.get(kind, [0.0, 0.0, 0.0])
            count += 1
            step = reward - mean
            mean += step / count
            self._seen[kind] = [count, mean, squares + step * (reward - mean)]
        return np.array([self._standardize(r, kind) for r, kind in zip(rewards.tolist(), kinds, strict=True)])

    def _standardize(self, reward: float, kind: str) -> float:
        count, mean, squares = self._seen[kind]
        deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
        return (reward - mean) / deviation if deviation > 1e-9 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {kind: list(seen) for kind, seen in self._seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {kind: list(seen) for kind, seen in state.items()}
