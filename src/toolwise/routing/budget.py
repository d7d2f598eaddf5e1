"""Budgets: a price λ ≥ 0 for each, raised while more is spent than allowed and lowered while less is.

    I ← clip(I + η·e, 0, cap)          e = mean cost − B, over everything observed since the last dual step
    λ = clip(I + kp·e + kd·Δe, 0, cap)

With kp = kd = 0 this is λ ← max(0, λ + η(mean cost − B)), plain dual ascent, which overshoots or is slow in a short
run; a proportional term holds the budget (PID Lagrangian methods, Stooke et al. 2020, arXiv 2007.03964). Anti-windup:
I stays within [0, cap] and does not grow while λ stands at its cap. Nothing here knows what is being paid for: tool
calls, seconds, tokens of thought.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.errors import ConfigError
from toolwise.protocols import Metrics

log = logging.getLogger("toolwise")


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of one unit may be spent on average, and how its price is found."""

    limit: float
    """B: the mean cost allowed."""
    unit: str = "cost"
    initial: float = 0.0
    """λ before the first dual step."""
    rate: float = 0.05
    """η: how much an overspending of 1 adds to λ, a dual step."""
    proportional: float = 0.0
    """kp: what an overspending of 1 adds to λ while it lasts."""
    derivative: float = 0.0
    """kd: what a rise of the mean cost by 1 since the last dual step adds to λ."""
    every: int = 1
    """K: training steps between dual steps."""
    cap: float | None = None
    """The highest λ; below 2 × (reward gap ÷ price) it can put B out of reach."""

    def __post_init__(self) -> None:
        for name in ("limit", "initial", "rate", "proportional", "derivative", "cap"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"budget {self.unit!r}: {name} must be a number from 0 up, got {value!r}")
        if self.every < 1:
            raise ConfigError(f"budget {self.unit!r}: every must be 1 or more, got {self.every}")
        if self.cap is not None and self.initial > self.cap:
            raise ConfigError(f"budget {self.unit!r}: initial {self.initial:g} is above its cap {self.cap:g}")


class Multiplier:
    """One budget's λ and what it goes by; survives a crash."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.value = budget.initial
        self.integral = budget.initial
        self.error: float | None = None
        """Of the last dual step; None before the first."""
        self.steps = 0
        self.at_cap = False
        """λ would be higher but for its cap."""
        self._spent = 0.0
        self._weight = 0.0
        self._step_spent = 0.0
        self._step_weight = 0.0
        self._last_mean: float | None = None

    def observe(self, costs: Iterable[float], weights: Iterable[float] | None = None) -> None:
        """Costs since the last dual step: of rollouts, or of the policy at prompts; weighed alike unless told."""
        paid = [float(cost) for cost in costs]
        weighed = [1.0] * len(paid) if weights is None else [float(weight) for weight in weights]
        if len(paid) != len(weighed):
            raise ValueError(f"{len(paid)} costs for {len(weighed)} weights")
        spent, weight = math.fsum(c * w for c, w in zip(paid, weighed, strict=True)), math.fsum(weighed)
        if not (math.isfinite(spent) and math.isfinite(weight)):
            raise ValueError(f"a cost in {self.budget.unit!r} is not a finite number")
        self._spent += spent
        self._weight += weight
        self._step_spent += spent
        self._step_weight += weight
        if self._step_weight:
            self._last_mean = self._step_spent / self._step_weight

    def step(self) -> bool:
        """Ends a training step; every K of them is a dual step, unless nothing was observed. Whether it was one."""
        self.steps += 1
        self._step_spent = self._step_weight = 0.0
        if self.steps % self.budget.every or not self._weight:
            return False
        error = self._spent / self._weight - self.budget.limit
        self._spent = self._weight = 0.0
        self._update(error)
        return True

    def _update(self, error: float) -> None:
        budget, cap = self.budget, math.inf if self.budget.cap is None else self.budget.cap
        change = 0.0 if self.error is None else error - self.error
        ahead = budget.proportional * error + budget.derivative * change
        grown = min(max(self.integral + budget.rate * error, 0.0), cap)
        # At its cap λ cannot answer: an integral that grew on would hold it there long after the overspending ended.
        held = self.integral + ahead >= cap and grown > self.integral
        self.integral = self.integral if held else grown
        wanted = self.integral + ahead
        self.value, self.error = min(max(wanted, 0.0), cap), error
        at_cap = held or wanted >= cap
        if at_cap and error > 0 and not self.at_cap:
            log.warning(
                "budget %r: λ is at its cap %g and %g more than %g is spent; raise the cap, or B is out of reach",
                budget.unit,
                cap,
                error,
                budget.limit,
            )
        self.at_cap = at_cap

    def metrics(self, prefix: str = "router") -> Metrics:
        name = f"{prefix}/{self.budget.unit}"
        figures = {
            f"{name}/lambda": self.value,
            f"{name}/budget": self.budget.limit,
            f"{name}/lambda_at_cap": float(self.at_cap),
        }
        if self._last_mean is not None:
            figures |= {f"{name}/mean": self._last_mean, f"{name}/gap": self._last_mean - self.budget.limit}
        return figures

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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.integral, self.error = state["value"], state["integral"], state["error"]
        self.steps, self.at_cap, self._last_mean = state["steps"], state["binds"], state["last_mean"]
        self._spent, self._weight = state["spent"], state["weight"]


class Budgets:
    """Several budgets at once, each with its λ; one a unit."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        units = [budget.unit for budget in budgets]
        twice = {unit for unit in units if units.count(unit) > 1}
        if twice:
            raise ConfigError(f"there are two budgets in {sorted(twice)[0]!r}; keep one a unit")
        self.multipliers = {budget.unit: Multiplier(budget) for budget in budgets}

    @property
    def prices(self) -> dict[str, float]:
        """unit -> λ"""
        return {unit: multiplier.value for unit, multiplier in self.multipliers.items()}

    def set_prices(self, prices: Mapping[str, float]) -> None:
        """λ as somebody found them; what is not told stays."""
        for unit in prices.keys() & self.multipliers.keys():
            self.multipliers[unit].value = self.multipliers[unit].integral = float(prices[unit])

    def check_units(self, units: Iterable[str]) -> None:
        """That every budget is in a unit which something costs."""
        known = tuple(units)
        for unit in self.multipliers:
            if unit not in known:
                raise ConfigError(f"a budget is in {unit!r}, and costs are in {', '.join(known)}")

    def observe(self, costs: Mapping[str, Iterable[float]], weights: Sequence[float] | None = None) -> None:
        """unit -> costs; units without a budget are passed over."""
        for unit, multiplier in self.multipliers.items():
            if unit not in costs:
                raise ValueError(f"no costs in {unit!r}, which has a budget")
            multiplier.observe(costs[unit], weights)

    def step(self) -> None:
        """Ends a training step."""
        for multiplier in self.multipliers.values():
            multiplier.step()

    def metrics(self, prefix: str = "router") -> Metrics:
        return {name: value for m in self.multipliers.values() for name, value in m.metrics(prefix).items()}

    def state_dict(self) -> dict[str, Any]:
        return {unit: multiplier.state_dict() for unit, multiplier in self.multipliers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A budget that is new since then begins at its initial price; one that is gone is forgotten."""
        for unit, multiplier in self.multipliers.items():
            if unit in state:
                multiplier.load_state_dict(state[unit])
