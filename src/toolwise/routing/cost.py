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
from collections.abc import Mapping
from typing import Annotated, ClassVar, Protocol

from pydantic import Field

from toolwise.config.loader import Section, build_config
from toolwise.config.router import RouterConfig
from toolwise.errors import ConfigError
from toolwise.routing.families import Family
from toolwise.routing.usage import UNREADABLE, RouteUsage
from toolwise.tools.base import BaseTool

COST_UNIT = "cost"
"""The default unit."""
_FAMILY_UNITS = (COST_UNIT, *(family.value.lower() for family in Family))
Price = Annotated[float, Field(strict=True, ge=0.0)]


class Cost(Protocol):
    """Maps tool usage to its cost."""

    @property
    def units(self) -> tuple[str, ...]:
        """The units of the result; every call returns all of them."""
        ...

    def __call__(self, usage: RouteUsage) -> dict[str, float]: ...


class AnyCost(Section):
    """`cost = "any"`: a flat price for using any tool."""

    units: ClassVar[tuple[str, ...]] = (COST_UNIT,)
    price: Price = 1.0

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        return {COST_UNIT: self.price * usage.used_any_tool}


class FamilyCost(Section):
    """`cost = "family"`: a flat price per family used."""

    units: ClassVar[tuple[str, ...]] = _FAMILY_UNITS
    c_search: Price = 1.0
    c_calc: Price = 1.0
    c_other: Price = 1.0
    """Tools of neither family are available in both tool routes, so they are not free."""

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        prices = {Family.SEARCH: self.c_search, Family.CALCULATE: self.c_calc, Family.OTHER: self.c_other}
        return _with_total({family: price * bool(usage.calls.get(family)) for family, price in prices.items()})


class CallsCost(Section):
    """`cost = "calls"`: every call costs the same."""

    units: ClassVar[tuple[str, ...]] = _FAMILY_UNITS
    price: Price = 1.0

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        return _with_total({family: self.price * usage.calls.get(family, 0) for family in Family})


class PricesCost(Section):
    """`cost = "prices"`: a price per call for each tool, in any number of units.

    A call that names no tool costs as much as the most expensive one, so that malformed calls save nothing.
    """

    prices: dict[str, dict[str, Price]] = Field(min_length=1)
    """unit -> {tool name, or family, or "*" for all others -> price of a call}. Tools without a price are free."""

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
            return max((price for key, price in table.items() if key != "*"), default=table.get("*", 0.0))
        return next((table[key] for key in (tool, family.value, family.value.lower(), "*") if key in table), 0.0)


COSTS: dict[str, type[AnyCost | FamilyCost | CallsCost | PricesCost]] = {
    "any": AnyCost,
    "family": FamilyCost,
    "calls": CallsCost,
    "prices": PricesCost,
}


def build_cost(router: RouterConfig, tools: Mapping[str, BaseTool]) -> Cost:
    """The cost that `router.cost` names, with the options in `router.cost_kwargs`."""
    if router.cost != "tools":
        return build_config(COSTS[router.cost], router.cost_kwargs, source=f"router.cost_kwargs of {router.cost!r}")
    if router.cost_kwargs:
        raise ConfigError('router.cost is "tools", which uses the prices of the tools: remove router.cost_kwargs')
    # Tools that a prompt only describes have the default price.
    prices = {name: tool.price for name, tool in tools.items()} | {"*": BaseTool.price}
    return build_config(PricesCost, {"prices": {COST_UNIT: prices}}, source="the prices of the tools")


def _with_total(parts: Mapping[Family, float]) -> dict[str, float]:
    return {COST_UNIT: float(sum(parts.values()))} | {family.value.lower(): float(c) for family, c in parts.items()}
