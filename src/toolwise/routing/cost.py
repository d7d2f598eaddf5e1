"""The cost of a rollout's tool use, in one unit or several; budgets limit its mean.

    any      price · [a tool was used]
    family   c_search · [search was used] + c_calc · [calculation was used] + c_other · [another tool was used]
    calls    price · number of calls
    prices   for each unit, the sum over calls of what one call of that tool costs

The first three are in the unit "cost". `family` and `calls` also give each family's part (`search`, `calculate`,
`other`), so that a family can have its own budget. A unit without a budget is reported but never subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from toolwise.envs.catalog import check_options
from toolwise.errors import ConfigError
from toolwise.routing.families import Family
from toolwise.routing.usage import UNREADABLE, RouteUsage
from toolwise.tools.base import BaseTool

COST_UNIT = "cost"
"""The default unit."""
_FAMILY_UNITS = (COST_UNIT, *(family.value.lower() for family in Family))


class Cost(Protocol):
    """Maps tool usage to its cost."""

    @property
    def units(self) -> tuple[str, ...]:
        """The units of the result; every call returns all of them."""
        ...

    def __call__(self, usage: RouteUsage) -> dict[str, float]: ...


class _FlatPrices:
    """Every field is a price."""

    def __post_init__(self) -> None:
        for name, price in asdict(self).items():  # type: ignore[call-overload]
            check_price(name, price)


@dataclass(frozen=True)
class AnyCost(_FlatPrices):
    """`cost = "any"`: a flat price for using any tool."""

    units: ClassVar[tuple[str, ...]] = (COST_UNIT,)
    price: float = 1.0

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        return {COST_UNIT: self.price * usage.used_any_tool}


@dataclass(frozen=True)
class FamilyCost(_FlatPrices):
    """`cost = "family"`: a flat price per family used."""

    units: ClassVar[tuple[str, ...]] = _FAMILY_UNITS
    c_search: float = 1.0
    c_calc: float = 1.0
    c_other: float = 1.0
    """Tools of neither family are available in both tool routes, so they are not free."""

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        prices = {Family.SEARCH: self.c_search, Family.CALCULATE: self.c_calc, Family.OTHER: self.c_other}
        return _with_total({family: price * bool(usage.calls.get(family)) for family, price in prices.items()})


@dataclass(frozen=True)
class CallsCost(_FlatPrices):
    """`cost = "calls"`: every call costs the same."""

    units: ClassVar[tuple[str, ...]] = _FAMILY_UNITS
    price: float = 1.0

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        return _with_total({family: self.price * usage.calls.get(family, 0) for family in Family})


@dataclass(frozen=True, slots=True)
class PricesCost:
    """`cost = "prices"`: a price per call for each tool, in any number of units.

    `prices`: unit -> {tool name, or family, or "*" for all others -> price of a call}. Tools without a price are free.
    A call that names no tool costs as much as the most expensive one, so that malformed calls save nothing.
    """

    prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prices:
            raise ConfigError('cost "prices" has no prices; give a table per unit, such as usd = { search = 0.01 }')
        for unit, table in self.prices.items():
            if not isinstance(table, Mapping):
                raise ConfigError(f"prices.{unit} is {table!r}; give a table of tools, such as {{ search = 0.01 }}")
            for tool, price in table.items():
                check_price(f"prices.{unit}.{tool}", price)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(self.prices)

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        return {
            unit: math.fsum(
                count * self.price_of(unit, tool, usage.families.get(tool, Family.OTHER))
                for tool, count in usage.calls_by_tool.items()
            )
            for unit in self.prices
        }

    def price_of(self, unit: str, tool: str, family: Family) -> float:
        table = self.prices[unit]
        if tool == UNREADABLE and UNREADABLE not in table:
            return float(max((price for key, price in table.items() if key != "*"), default=table.get("*", 0.0)))
        return next((float(table[key]) for key in (tool, family.value, family.value.lower(), "*") if key in table), 0.0)


COSTS: dict[str, Callable[..., Cost]] = {
    "any": AnyCost,
    "family": FamilyCost,
    "calls": CallsCost,
    "prices": PricesCost,
}


def build_cost(kind: str, **settings: Any) -> Cost:
    """Builds the cost called `kind`."""
    check_options(COSTS[kind], settings, f"router.cost_kwargs: cost {kind!r}", {})
    return COSTS[kind](**settings)


def tool_prices(tools: Mapping[str, BaseTool]) -> PricesCost:
    """The tools' own prices; tools that a prompt only describes have the default price."""
    return PricesCost({COST_UNIT: {name: tool.price for name, tool in tools.items()} | {"*": BaseTool.price}})


def check_price(name: str, price: Any) -> None:
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
        raise ConfigError(f"{name} must be a finite number of at least 0, got {price!r}")


def _with_total(parts: Mapping[Family, float]) -> dict[str, float]:
    return {COST_UNIT: float(sum(parts.values()))} | {family.value.lower(): float(c) for family, c in parts.items()}
