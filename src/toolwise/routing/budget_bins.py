"""Budgets drawn at random in training: a λ for each, one head that knows them all, and a threshold for each.

A prompt draws one of the budgets, is routed by the head's output for it, and pays its λ; only that λ sees what the
prompt spends. Afterwards a budget between two of them is served by a lottery between both, which depends on the prompt
alone and whose mean cost is that budget.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from toolwise.config.router import RouterConfig
from toolwise.errors import QuestionError
from toolwise.messages import Message
from toolwise.protocols import Metrics
from toolwise.routing.budget import Multiplier
from toolwise.routing.calibration import BudgetCalibration, prompt_uniform, read_calibration

BINS_KEY = "trained_budgets"
"""Of the head's metadata and of the router's state: the calibration of each budget."""


class BudgetBins:
    """The budgets of a router, in ascending order, with their λ and, once it is calibrated, their thresholds."""

    def __init__(self, router: RouterConfig) -> None:
        assert router.random_budgets is not None
        first = router.budgets[0]
        self.unit, self.default = first.unit, first.limit
        self.values = router.random_budgets.values(first.limit)
        self.multipliers = [
            Multiplier(first.model_copy(update={"limit": value, "unit": f"{first.unit}@{value:g}"}))
            for value in self.values
        ]
        self.calibrations: tuple[BudgetCalibration, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def draw(self, rng: Random) -> int:
        return rng.randrange(len(self))

    def pick(self, budget: float | None, prompt: Sequence[Message]) -> int:
        """The budget's own bin, or one of its neighbours by the prompt's lot; None: the default."""
        (index, weight), *more = self.weights(self.default if budget is None else budget)
        return index if not more or prompt_uniform(prompt, "budget") < weight else more[0][0]

    def weights(self, value: float) -> list[tuple[int, float]]:
        """A budget's own bin, or its neighbours with the shares of prompts that they get."""
        low, high = self.values[0], self.values[-1]
        if not low - 1e-9 <= value <= high + 1e-9:
            raise QuestionError(
                f"budget {value:g} is outside {low:g} to {high:g}, which the router was trained for: choose one within",
                "budget",
            )
        above = min(bisect_left(self.values, value - 1e-9), len(self) - 1)
        gap = self.values[above] - value
        if gap <= 1e-9 or above == 0:
            return [(above, 1.0)]
        share = gap / (self.values[above] - self.values[above - 1])
        return [(above - 1, share), (above, 1.0 - share)]

    def lambdas(self, fixed: Mapping[str, float], index: int | None) -> dict[str, float]:
        """unit -> λ for a prompt with a budget; `fixed` are those of the other units."""
        return dict(fixed) if index is None else {**fixed, self.unit: self.multipliers[index].value}

    def feasibility(self, bins: Sequence[int], costs: Sequence[float], weights: Sequence[float]) -> Metrics:
        """For each budget, the share of its rollouts that cost no more than it."""
        metrics = {}
        for index, value in enumerate(self.values):
            members = [(c, w) for b, c, w in zip(bins, costs, weights, strict=True) if b == index]
            if total := sum(weight for _, weight in members):
                within = sum(weight for cost, weight in members if cost <= value + 1e-9)
                metrics[f"router/{self.unit}@{value:g}/within"] = within / total
        return metrics

    @property
    def default_lambda(self) -> float:
        return self.multipliers[self.values.index(self.default)].value

    def step(self) -> None:
        """Ends a training step; a budget that no prompt drew keeps its λ."""
        for multiplier in self.multipliers:
            multiplier.step()

    def metrics(self) -> Metrics:
        return {name: value for m in self.multipliers for name, value in m.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": list(self.values),
            "multipliers": [multiplier.state_dict() for multiplier in self.multipliers],
            BINS_KEY: self.calibrations_to_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if tuple(state.get("values", ())) == self.values:
            for multiplier, saved in zip(self.multipliers, state["multipliers"], strict=True):
                multiplier.load_state_dict(saved)
            self.load_calibrations(state.get(BINS_KEY) or ())

    def calibrations_to_json(self) -> list[dict[str, Any]]:
        return [calibration.to_json() for calibration in self.calibrations]

    def load_calibrations(self, stored: Sequence[Any]) -> None:
        """Those that were fitted to the same budgets."""
        read = tuple(read_calibration(each) for each in stored)
        if tuple(each.limits[each.units.index(self.unit)] for each in read if self.unit in each.units) == self.values:
            self.calibrations = read
