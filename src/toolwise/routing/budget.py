"""Budgets on mean cost, each enforced by a dual variable λ ≥ 0 that rises while spending exceeds it, else falls.

    I ← clip(I + η·e, 0, cap)          e = mean cost − B, over everything observed since the last dual step
    λ = clip(I + kp·e + kd·Δe, 0, cap)

With kp = kd = 0 this is λ ← max(0, λ + η(mean cost − B)), plain dual ascent, which overshoots or is slow in a short
run; a proportional term holds the budget (PID Lagrangian methods, Stooke et al. 2020, arXiv 2007.03964). Anti-windup:
I stays within [0, cap] and does not grow while λ is at its cap. The unit of cost is arbitrary: tool calls, seconds,
thinking tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from toolwise.config.router import BudgetConfig
from toolwise.errors import ConfigError
from toolwise.protocols import Metrics

log = logging.getLogger("toolwise")

TOLERANCE = 0.05
"""A mean cost up to 5 % above a budget counts as within it."""


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


class Multiplier:
    """The λ of one budget and the state of its controller; saved in checkpoints."""

    def __init__(self, budget: BudgetConfig) -> None:
        self.budget = budget
        self.value = budget.initial
        self.integral = budget.initial
        self.error: float | None = None
        """The error of the last dual step; None before the first."""
        self.steps = 0
        self.at_cap = False
        """Whether the cap keeps λ from being higher."""
        self._spent = 0.0
        self._weight = 0.0
        self._step_spent = 0.0
        self._step_weight = 0.0
        self._last_mean: float | None = None
        self._solved: float | None = None
        """The λ that solved the problem at the last dual step, if it was given."""

    def observe(self, costs: Iterable[float]) -> None:
        """Adds costs since the last dual step: of rollouts, or expected ones of prompts."""
        paid = [float(cost) for cost in costs]
        spent, weight = math.fsum(paid), float(len(paid))
        if not math.isfinite(spent):
            raise ValueError(f"a cost in {self.budget.unit!r} is not a finite number")
        self._spent += spent
        self._weight += weight
        self._step_spent += spent
        self._step_weight += weight
        if self._step_weight:
            self._last_mean = self._step_spent / self._step_weight

    def step(self, mean: float | None = None, solved: float | None = None) -> bool:
        """Ends a training step. Every K-th is a dual step unless nothing was observed; returns whether it was one.

        `mean` replaces the mean of what was observed. `solved` is the λ that would solve the problem as far as it is
        known (`routing/head/budget_window.py`): the controller starts there and moves with it.
        """
        self.steps += 1
        self._step_spent = self._step_weight = 0.0
        if self.steps % self.budget.every or not self._weight:
            return False
        error = (self._spent / self._weight if mean is None else mean) - self.budget.limit
        self._spent = self._weight = 0.0
        if solved is not None:
            shifted = solved if self._solved is None else self.integral + solved - self._solved
            self.integral, self._solved = min(max(shifted, 0.0), self._cap), solved
        self._update(error)
        return True

    @property
    def _cap(self) -> float:
        return math.inf if self.budget.cap is None else self.budget.cap

    def _update(self, error: float) -> None:
        budget, cap = self.budget, self._cap
        change = 0.0 if self.error is None else error - self.error
        response = budget.proportional * error + budget.derivative * change
        integral = min(max(self.integral + budget.rate * error, 0.0), cap)
        # At its cap λ cannot respond: a growing integral would hold it there long after the excess has ended.
        saturated = self.integral + response >= cap and integral > self.integral
        self.integral = self.integral if saturated else integral
        unclipped = self.integral + response
        self.value, self.error = min(max(unclipped, 0.0), cap), error
        at_cap = saturated or unclipped >= cap
        if at_cap and error > 0 and not self.at_cap:
            log.warning(
                "budget %r: λ is at its cap %g and the mean cost is %g above the limit %g: raise the cap or the limit",
                budget.unit,
                cap,
                error,
                budget.limit,
            )
        self.at_cap = at_cap

    def metrics(self, prefix: str = "router") -> Metrics:
        name = f"{prefix}/{self.budget.unit}"
        metrics = {
            f"{name}/lambda": self.value,
            f"{name}/budget": self.budget.limit,
            f"{name}/lambda_at_cap": float(self.at_cap),
        }
        if self._last_mean is not None:
            metrics |= {f"{name}/mean": self._last_mean, f"{name}/gap": self._last_mean - self.budget.limit}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "integral": self.integral,
            "error": self.error,
            "steps": self.steps,
            "binds": self.at_cap,
            "spent": self._spent,
            "weight": self._weight,
            "last_mean": self._last_mean,
            "solved": self._solved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.integral, self.error = state["value"], state["integral"], state["error"]
        self.steps, self.at_cap, self._last_mean = state["steps"], state["binds"], state["last_mean"]
        self._spent, self._weight, self._solved = state["spent"], state["weight"], state.get("solved")


def delivered_metrics(
    costs: Sequence[Mapping[str, float]], limits: Mapping[str, float], max_cost: float | None
) -> Metrics:
    """What rollouts spent in each unit against its limit, and the shares of them within it and within the cap, which is
    in the first unit. `costs` are those of each rollout, by unit."""
    metrics: Metrics = {}
    for unit, limit in limits.items():
        spent = [cost[unit] for cost in costs]
        metrics |= {
            f"budget/{unit}/limit": limit,
            f"budget/{unit}/delivered": fmean(spent),
            f"budget/{unit}/stderr": standard_error(spent),
            f"budget/{unit}/within": share_within(spent, limit),
        }
    if max_cost is not None and limits:
        first = next(iter(limits))
        metrics["budget/max_cost/within"] = share_within([cost[first] for cost in costs], max_cost)
    return metrics


def share_within(costs: Sequence[float], limit: float) -> float:
    """Feasibility: the share of episodes that cost no more than `limit`."""
    return fmean(cost <= limit + 1e-9 for cost in costs)


class FollowedMultiplier:
    """The λ of something that a unit prices, such as a thinking token: `price` times the unit's λ. The budget of the
    unit moves it, so it observes and stores nothing."""

    def __init__(self, budgets: Budgets, unit: str, price: float) -> None:
        self.budgets, self.unit, self.price = budgets, unit, price

    @property
    def value(self) -> float:
        return self.price * self.budgets.lambdas[self.unit]

    def observe(self, costs: Iterable[float]) -> None:
        pass

    def step(self) -> bool:
        return False

    def metrics(self, prefix: str = "thinking") -> Metrics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Budgets:
    """Several budgets, one per unit, each with its λ."""

    def __init__(self, budgets: Sequence[BudgetConfig]) -> None:
        units = [budget.unit for budget in budgets]
        duplicates = {unit for unit in units if units.count(unit) > 1}
        if duplicates:
            raise ConfigError(f"there are two budgets in {sorted(duplicates)[0]!r}; keep one per unit")
        self.multipliers = {budget.unit: Multiplier(budget) for budget in budgets}

    @property
    def lambdas(self) -> dict[str, float]:
        """unit -> λ"""
        return {unit: multiplier.value for unit, multiplier in self.multipliers.items()}

    def set_lambdas(self, lambdas: Mapping[str, float]) -> None:
        """Sets λ of the given units; the others keep theirs."""
        for unit in lambdas.keys() & self.multipliers.keys():
            self.multipliers[unit].value = self.multipliers[unit].integral = float(lambdas[unit])

    def check_units(self, units: Iterable[str]) -> None:
        """Raises unless every budget is in one of `units`."""
        known = tuple(units)
        for unit in self.multipliers:
            if unit not in known:
                raise ConfigError(f"a budget is in {unit!r}, but costs are in {', '.join(known)}")

    def observe(self, costs: Mapping[str, Iterable[float]], *, without: str | None = None) -> None:
        """unit -> costs; units without a budget are ignored, and `without`, whose λ is controlled elsewhere."""
        for unit, multiplier in self.multipliers.items():
            if unit != without:
                multiplier.observe(costs[unit])

    def step(self, means: Sequence[float] = (), solved: Sequence[float | None] = ()) -> None:
        """`means` and `solved` are in the order of the budgets; see `Multiplier.step`."""
        for index, multiplier in enumerate(self.multipliers.values()):
            multiplier.step(means[index] if means else None, solved[index] if solved else None)

    @property
    def limits(self) -> dict[str, float]:
        """unit -> B"""
        return {unit: multiplier.budget.limit for unit, multiplier in self.multipliers.items()}

    def overspend(self, costs: Sequence[Mapping[str, float]], *, chance: float = 0.0) -> float:
        """The largest excess of the mean cost over a budget, relative to that budget (for a budget of 0: the mean
        cost); 0 if all are met. `costs` are those of each rollout, by unit; `chance` is how many standard errors of
        their mean are tolerated."""
        excess = [0.0]
        for unit, limit in self.limits.items():
            spent = [cost[unit] for cost in costs]
            mean = fmean(spent)
            if mean > limit * (1 + TOLERANCE) + chance * standard_error(spent):
                excess.append((mean - limit) / limit if limit else mean)
        return max(excess)

    def metrics(self, prefix: str = "router") -> Metrics:
        return {name: value for m in self.multipliers.values() for name, value in m.metrics(prefix).items()}

    def state_dict(self) -> dict[str, Any]:
        return {unit: multiplier.state_dict() for unit, multiplier in self.multipliers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A budget added since then starts at its initial λ; a removed one is dropped."""
        for unit, multiplier in self.multipliers.items():
            if unit in state:
                multiplier.load_state_dict(state[unit])
