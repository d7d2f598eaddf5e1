"""Which tools a rollout used, by family, and what they cost, in one unit or several; budgets limit the mean cost.

    any      price · [a tool was used]
    family   c_search · [search was used] + c_calc · [calculation was used] + c_other · [another tool was used]
    calls    price · number of calls
    prices   for each unit, the sum over calls of what one call of that tool costs, and over meters (routing/meters.py)
             of what a token, a thinking token or a second costs

The first three are in the unit "cost". `family` and `calls` also give each family's part (`search`, `calculate`,
`other`), so that a family can have its own budget. A unit without a budget is reported but never subtracted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr

from toolwise.config.loader import Section, build_config
from toolwise.config.router import RouterConfig
from toolwise.errors import ConfigError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.parsers import parse_auto, parse_rlla
from toolwise.routing.families import Family, family_of_call, parse_family
from toolwise.routing.meters import METERS
from toolwise.routing.prompts import prompt_style
from toolwise.routing.routes import COST_UNIT
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, StepData, Task

UNREADABLE = "unreadable"
"""The name under which calls without a readable tool name are counted, here and in the environment."""

_NO_CALLS: dict[str, int] = dict.fromkeys(Family, 0)
UsageSource = Literal["auto", "executed", "text"]


@dataclass(frozen=True, slots=True)
class RouteUsage:
    calls_by_tool: Mapping[str, int] = field(default_factory=dict)
    families: Mapping[str, str] = field(default_factory=dict)
    """The family of each tool in `calls_by_tool` and `offered`."""
    meters: Mapping[str, float] = field(default_factory=dict)
    """Amounts of what a price list prices besides calls, by its names for them."""
    offered: tuple[str, ...] = ()
    """The tools that could be called, whose highest price a call that names no tool costs; empty: any tool."""

    @property
    def calls(self) -> dict[str, int]:
        """By family; the default families are always there."""
        counts: dict[str, int] = _NO_CALLS.copy()
        for tool, count in self.calls_by_tool.items():
            family = self.families.get(tool, Family.OTHER)
            counts[family] = counts.get(family, 0) + count
        return counts

    @property
    def used_any_tool(self) -> bool:
        return any(self.calls_by_tool.values())

    @classmethod
    def of(
        cls, calls_by_tool: Mapping[str, int], families: Mapping[str, str], *, offered: Collection[str] = ()
    ) -> RouteUsage:
        """A tool that is not in `families` is classified by its name."""
        calls = {tool: count for tool, count in calls_by_tool.items() if count}
        known = {tool: family_of_call(tool, families) for tool in (*calls, *offered)}
        return cls(calls, known, offered=tuple(offered))


def usage_of(
    rollout: Rollout,
    families: Mapping[str, str],
    *,
    allowed: Collection[str] | None = None,
    source: UsageSource = "auto",
) -> RouteUsage:
    """The tools a rollout used. `allowed` are the tools of its route; calls of others were refused and are free.

    "auto" reads the text if the prompt itself describes its tools, as RLLA's do: those calls are not executed.
    """
    if counts_written_calls(rollout.task, source):
        return written_usage(rollout.steps, families)
    # As the environment charges: calls of available tools, including failed ones, and calls that name no tool.
    offered = tuple(families if allowed is None else allowed)
    reachable = {UNREADABLE, *offered}
    calls = merge_unknown_calls(rollout.usage.calls, families).items()
    return RouteUsage.of({tool: count for tool, count in calls if tool in reachable}, families, offered=offered)


def counts_written_calls(task: Task, source: UsageSource) -> bool:
    """Whether the usage of a task's rollouts is counted from the calls in their text, because none are executed."""
    return source == "text" or (source == "auto" and prompt_style(task.prompt) == "rlla")


def written_usage(steps: Sequence[StepData], families: Mapping[str, str]) -> RouteUsage:
    """The calls in the policy's raw text of each step, including its thinking; without text, in its parsed action."""
    fields = [
        step.action_taken if step.raw_policy_output is None else {"content": step.raw_policy_output} for step in steps
    ]
    return usage_of_messages(
        [Message(role="assistant", content=f.get("content"), tool_calls=f.get("tool_calls")) for f in fields], families
    )


def usage_of_messages(messages: Sequence[Message], families: Mapping[str, str]) -> RouteUsage:
    """The calls that the assistant wrote, executed or not.

    A block that cannot be parsed counts as a call of an unknown tool: it was an attempt to use one.
    """
    replies = (message for message in messages if message.role == "assistant")
    return RouteUsage.of(
        Counter(call.name or UNREADABLE for message in replies for call in tool_calls_in(message)), families
    )


def tool_calls_in(message: Message) -> list[ToolCall]:
    """The parsed calls of a message; without them, those in its text, also several in a block, one per line."""
    if message.tool_calls:
        return message.tool_calls
    text = message.content or ""
    # Only RLLA's parser handles blocks with one call per line and both kinds of keys.
    return (parse_rlla if "<tool_call>" in text.lower() else parse_auto)(text)[1]


def merge_unknown_calls(calls: Mapping[str, int], families: Mapping[str, str]) -> Counter[str]:
    """Calls by tool; those that name none of the task's tools are attempts and count as `UNREADABLE`, never free."""
    counts: Counter[str] = Counter()
    for tool, count in calls.items():
        counts[tool if tool in families else UNREADABLE] += count
    return counts


def refused_by_route(calls: Mapping[str, int], families: Mapping[str, str], offered: Collection[str]) -> Counter[str]:
    """Calls of the task's tools that are not among the `offered` ones."""
    return Counter({tool: count for tool, count in calls.items() if tool in families and tool not in offered})


DEFAULT_FAMILIES: tuple[str, ...] = tuple(Family)
Price = Annotated[float, Field(strict=True, ge=0.0)]


class AnyCost(Section):
    """`cost = "any"`: a flat price for using any tool."""

    units: ClassVar[tuple[str, ...]] = (COST_UNIT,)
    price: Price = 1.0

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        return {COST_UNIT: self.price * usage.used_any_tool}


class _FamiliesCost(Section):
    """A cost with a part for each family."""

    _families: tuple[str, ...] = PrivateAttr(default=DEFAULT_FAMILIES)

    @property
    def units(self) -> tuple[str, ...]:
        return (COST_UNIT, *(family.lower() for family in self._families))


class FamilyCost(_FamiliesCost):
    """`cost = "family"`: a flat price per family used."""

    c_search: Price = 1.0
    c_calc: Price = 1.0
    c_other: Price = 1.0
    """Tools of neither family are available in both tool routes, so they are not free."""
    families: dict[str, Price] = Field(default_factory=dict)
    """Prices of other families; 1 for those that are not in it."""

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        named = {name.upper(): price for name, price in self.families.items()}
        prices = named | {Family.SEARCH: self.c_search, Family.CALCULATE: self.c_calc, Family.OTHER: self.c_other}
        calls = usage.calls
        return _with_total({f: prices.get(f, 1.0) * bool(calls.get(f)) for f in self._families})


class CallsCost(_FamiliesCost):
    """`cost = "calls"`: every call costs the same."""

    price: Price = 1.0

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        calls = usage.calls
        return _with_total({family: self.price * calls.get(family, 0) for family in self._families})


class PricesCost(Section):
    """`cost = "prices"`: a price list in any number of units: per call for each tool, per token, per second.

    A call that names no tool costs as much as the most expensive one that could be called, so that malformed calls
    save nothing.
    """

    prices: dict[str, dict[str, Price]] = Field(min_length=1)
    """unit -> {tool name, or family, or "*" for all others -> price of a call; a meter -> price of one}. A tool costs
    what its name says, else its family, else "*"; without any of them it is free."""
    _star_is_default: bool = PrivateAttr(default=False)
    """Whether "*" is the default price of tools that a prompt only describes, and not a price of the user's."""

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(self.prices)

    def __call__(self, usage: RouteUsage) -> dict[str, float]:
        return {unit: self._calls(unit, usage) + self._metered(unit, usage) for unit in self.prices}

    @property
    def meters(self) -> tuple[str, ...]:
        """The meters that any unit prices."""
        return tuple(dict.fromkeys(key for table in self.prices.values() for key in table if key in METERS))

    def prices_meters(self, unit: str) -> bool:
        """Whether a unit prices anything besides calls."""
        return not METERS.keys().isdisjoint(self.prices[unit])

    def unit_price(self, unit: str, measured: str) -> float:
        """The price of one of what is measured, in `unit`: of a token, a thinking token or a second."""
        return math.fsum(
            price * METERS[key][1]
            for key, price in self.prices[unit].items()
            if key in METERS and METERS[key][0] == measured
        )

    def _calls(self, unit: str, usage: RouteUsage) -> float:
        families = usage.families

        def price(tool: str) -> float:
            if tool == UNREADABLE and usage.offered and UNREADABLE not in self.prices[unit]:
                return max(self.price_of(unit, name, families.get(name, Family.OTHER)) for name in usage.offered)
            return self.price_of(unit, tool, families.get(tool, Family.OTHER))

        return math.fsum(count * price(tool) for tool, count in usage.calls_by_tool.items())

    def _metered(self, unit: str, usage: RouteUsage) -> float:
        return math.fsum(p * usage.meters.get(key, 0.0) for key, p in self.prices[unit].items() if key in METERS)

    def price_of(self, unit: str, tool: str, family: str) -> float:
        table = {key: price for key, price in self.prices[unit].items() if key not in METERS}
        if tool == UNREADABLE and UNREADABLE not in table:
            named = [price for key, price in table.items() if key != "*" or not self._star_is_default]
            return max(named, default=table.get("*", 0.0))
        return next((table[key] for key in (tool, str(family), family.lower(), "*") if key in table), 0.0)


Cost = AnyCost | FamilyCost | CallsCost | PricesCost
"""Maps tool usage to its cost in each of its `units`."""
COSTS: dict[str, type[Cost]] = {
    "any": AnyCost,
    "family": FamilyCost,
    "calls": CallsCost,
    "prices": PricesCost,
}


def build_cost(router: RouterConfig, tools: Mapping[str, BaseTool]) -> Cost:
    """The cost that `router.cost` names, with the options in `router.cost_kwargs`."""
    if router.prices:
        return build_config(PricesCost, {"prices": router.prices}, source="router.prices")
    if router.cost != "tools":
        cost = build_config(COSTS[router.cost], router.cost_kwargs, source=f"router.cost_kwargs of {router.cost!r}")
        if isinstance(cost, _FamiliesCost) and router.own_routes:
            cost._families = _families_of(router)
        return cost
    if router.cost_kwargs:
        raise ConfigError('router.cost is "tools", which uses the prices of the tools: remove router.cost_kwargs')
    # Tools that a prompt only describes have the default price.
    prices = {name: tool.price for name, tool in tools.items()} | {"*": BaseTool.price}
    own = build_config(PricesCost, {"prices": {COST_UNIT: prices}}, source="the prices of the tools")
    own._star_is_default = True
    return own


def price_of_calls(
    cost: Cost, families: Mapping[str, str], unit: str, calls: Mapping[str, int], *, offered: Collection[str] = ()
) -> float:
    """What calls of a task's tools cost in a unit, given as tool name -> number of calls, where `offered` ones could be
    called."""
    return cost(RouteUsage.of(merge_unknown_calls(calls, families), families, offered=offered))[unit]


def price_of_offered(
    cost: Cost, families: Mapping[str, str], unit: str, offered: Collection[str], calls: Mapping[str, int]
) -> float:
    """What a rollout's calls cost in a unit if only `offered` tools could be called: calls of others are free."""
    paid = Counter(calls) - refused_by_route(calls, families, offered)
    return price_of_calls(cost, families, unit, paid, offered=offered)


def _families_of(router: RouterConfig) -> tuple[str, ...]:
    """The default families, then those that routes or `router.families` name."""
    named = [*router.families.values(), *(family for route in router.routes for family in route.families or ())]
    return tuple(dict.fromkeys([*DEFAULT_FAMILIES, *(parse_family(name, any_name=True) for name in named)]))


def _with_total(parts: Mapping[str, float]) -> dict[str, float]:
    return {COST_UNIT: float(sum(parts.values()))} | {family.lower(): float(c) for family, c in parts.items()}
