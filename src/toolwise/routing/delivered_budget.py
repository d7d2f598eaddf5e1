"""What a calibration measured: the cost that a trained router delivers under its budgets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DeliveredBudget:
    """What choosing routes in some way costs and scores on tasks that were never learned from."""

    units: tuple[str, ...]
    limits: tuple[float, ...]
    rows: int
    """Calibration tasks."""
    rolled_out: int
    """Those that were rolled out and scored."""
    costs: tuple[float, ...]
    """Mean costs on the calibration tasks: the limits, or less where a budget does not bind."""
    standard_errors: tuple[float, ...]
    """Of `costs`, and so of what is delivered to new prompts of the same kind."""
    score: float
    """Mean score on the tasks with rollouts."""
    slope: float = 0.0
    """Score gained per budget: d score / d (cost ÷ limit), near the budgets."""
    least: tuple[float, ...] = ()
    """What the cheapest routes cost."""
    step: int = 0
    """The training step whose weights it was fitted to."""

    @property
    def feasible(self) -> bool:
        return all(cost <= limit + 1e-9 for cost, limit in zip(self.costs, self.limits, strict=True))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def uncalibrated(other_budgets: bool, *, by_turn: bool = False) -> str:
    """Why routes are sampled although there are budgets, and what to do. `by_turn`: every turn has its route."""
    why = "is calibrated for other budgets" if other_budgets else "is not calibrated"
    return (
        f"this router {why}: routes are sampled from its head, so its budgets may be exceeded; train with "
        f"router.calibration{' and at least 256 tasks' if by_turn else ', or give budgets to toolwise eval --budgets'}"
    )


def format_cost(value: float, scale: float | None = None) -> str:
    """With three decimals, or more where costs are small, as money for calls is: three digits of `scale`, by default of
    the value itself."""
    size = abs(scale or value)
    decimals = 2 - math.floor(math.log10(size)) if 0 < size < math.inf else 3
    return f"{value:.{min(max(3, decimals), 12)}f}"
