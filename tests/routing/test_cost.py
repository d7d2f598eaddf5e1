"""From usage to cost, in one unit or several."""

from __future__ import annotations

import re
from typing import Any

import pytest

from toolwise.config.router import RouterConfig
from toolwise.errors import ConfigError
from toolwise.routing.cost import COSTS, AnyCost, CallsCost, Cost, FamilyCost, PricesCost, build_cost
from toolwise.routing.families import Family
from toolwise.routing.usage import RouteUsage
from toolwise.tools.catalog import build_tools

FAMILIES = {"search": Family.SEARCH, "wiki": Family.SEARCH, "calculator": Family.CALCULATE, "mail": Family.OTHER}
NOTHING = RouteUsage()
SEARCHED = RouteUsage.of({"search": 2, "wiki": 1}, FAMILIES)
BOTH = RouteUsage.of({"search": 1, "calculator": 3}, FAMILIES)
MAILED = RouteUsage.of({"mail": 2}, FAMILIES)


def make(kind: Any, options: dict[str, Any]) -> Cost:
    return build_cost(RouterConfig(cost=kind, cost_kwargs=options), {})


def test_any_tool_at_all() -> None:
    cost = AnyCost(price=0.5)
    assert [cost(usage)["cost"] for usage in (NOTHING, SEARCHED, BOTH, MAILED)] == [0.0, 0.5, 0.5, 0.5]


def test_a_price_per_family() -> None:
    cost = FamilyCost(c_search=2.0, c_calc=0.25)
    assert [cost(usage)["cost"] for usage in (NOTHING, SEARCHED, BOTH, MAILED)] == [0.0, 2.0, 2.25, 1.0]
    assert cost(BOTH) == {"cost": 2.25, "search": 2.0, "calculate": 0.25, "other": 0.0}


def test_a_price_per_call() -> None:
    cost = CallsCost(price=0.1)
    assert cost(SEARCHED)["cost"] == pytest.approx(0.3)
    assert cost(BOTH) == pytest.approx({"cost": 0.4, "search": 0.1, "calculate": 0.3, "other": 0.0})
    assert cost(NOTHING)["cost"] == 0.0


def test_prices_in_several_units() -> None:
    cost = PricesCost(prices={"usd": {"search": 0.01, "SEARCH": 0.1, "*": 1.0}, "seconds": {"calculate": 0.5}})
    assert cost.units == ("usd", "seconds")
    assert cost(SEARCHED) == pytest.approx({"usd": 2 * 0.01 + 0.1, "seconds": 0.0})
    assert cost(BOTH) == pytest.approx({"usd": 0.01 + 3.0, "seconds": 1.5})
    assert cost(MAILED) == {"usd": 2.0, "seconds": 0.0}


def test_prices_of_the_tools() -> None:
    tools = build_tools([{"name": "calculator", "price": 0.25}, "search"])
    assert build_cost(RouterConfig(), tools)(BOTH) == {"cost": 1.0 + 3 * 0.25}


def test_tools_that_are_only_described_are_not_free() -> None:
    assert build_cost(RouterConfig(), {})(SEARCHED) == {"cost": 3.0}


@pytest.mark.parametrize("kind", COSTS)
def test_every_cost_gives_all_its_units_whatever_was_used(kind: str) -> None:
    cost = make(kind, {"prices": {"usd": {"*": 1}}} if kind == "prices" else {})
    for usage in (NOTHING, SEARCHED, BOTH, MAILED):
        assert tuple(cost(usage)) == cost.units
        assert all(isinstance(value, float) for value in cost(usage).values())


def test_settings_are_passed_by_name() -> None:
    assert make("family", {"c_search": 3.0}) == FamilyCost(c_search=3.0)


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("any", {"c_search": 1.0}, "router.cost_kwargs of 'any': unknown key `c_search` (known keys: price)"),
        ("any", {"price": -1.0}, "`price` must be greater than or equal to 0, got -1.0"),
        ("family", {"c_calc": float("nan")}, "`c_calc` must be a finite number"),
        ("calls", {"price": True}, "`price` must be a valid number, got True"),
        ("prices", {}, "`prices` is required"),
        ("prices", {"prices": {}}, "`prices`: Dictionary should have at least 1 item"),
        ("prices", {"prices": {"usd": 3}}, "`prices.usd` must be a table, got 3"),
        ("prices", {"prices": {"usd": {"search": "much"}}}, "`prices.usd.search` must be a valid number, got 'much'"),
        ("tools", {"price": 2.0}, 'router.cost is "tools"'),
    ],
)
def test_bad_costs_are_named(kind: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        make(kind, options)


def test_a_tool_with_an_impossible_price_is_named() -> None:
    search = build_tools(["search"])["search"]
    search.price = -1.0
    with pytest.raises(ConfigError, match=r"the prices of the tools: `prices.cost.search` must be greater than"):
        build_cost(RouterConfig(), {"search": search})
