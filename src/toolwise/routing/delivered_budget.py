"""What a calibration measured: the cost that a trained router delivers under its budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from pydantic import ValidationError


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

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that do not belong together: those of a damaged file."""
        by_unit = (self.limits, self.costs, self.standard_errors, self.least or self.costs)
        if not self.units or len({*self.units}) != len(self.units):
            raise ValueError("its units are missing or repeat")
        if any(len(values) != len(self.units) for values in by_unit):
            raise ValueError("its limits and costs are not one per unit")
        check_numbers("its limits, costs and scores", self.score, self.slope, *chain(*by_unit))

    @property
    def feasible(self) -> bool:
        return all(map(is_within, self.costs, self.limits))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def reason_of(fault: ValidationError) -> str:
    """Why a stored calibration cannot be read."""
    return fault.errors()[0]["msg"].removeprefix("Value error, ")


def check_numbers(what: str, *values: float) -> None:
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{what} are not all finite numbers")


def check_shares(shares: Sequence[float]) -> None:
    if not all(share >= 0.0 for share in shares) or not math.isclose(math.fsum(shares), 1.0, abs_tol=1e-6):
        raise ValueError("its shares do not add up to 1")


def is_within(cost: float, limit: float) -> bool:
    """Up to rounding, which is relative: limits may be in any unit."""
    return cost <= limit + 1e-9 * max(1.0, limit)


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
