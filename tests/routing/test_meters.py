"""What a price list can price besides calls, with costs worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from thinking_cases import REPLY, scored

from toolwise.config.loader import build_config
from toolwise.config.router import BudgetConfig, RouterConfig
from toolwise.errors import ConfigError
from toolwise.routing.budget import Budgets, FollowedMultiplier
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import PricesCost, RouteUsage, build_cost
from toolwise.routing.families import Family
from toolwise.routing.meters import METERS, estimate_thinking, read_meters
from toolwise.types import Rollout, Usage

FAMILIES = {"search": Family.SEARCH, "calculator": Family.CALCULATE}


def used(**amounts: Any) -> Rollout:
    return replace(scored(1.0, [REPLY]).rollout, usage=Usage(**amounts))


ROLLOUT = used(
    calls={"search": 2}, sampled_tokens=50, prompt_tokens=400, tool_s={"search": 0.25, "calculator": 0.5}, cost=9.0
)


@pytest.mark.parametrize(
    ("name", "amount"),
    [
        ("tokens", 50.0),
        ("tokens_1k", 0.05),
        ("thinking_tokens", 12.0),
        ("thinking_tokens_1k", 0.012),
        ("prompt_tokens", 400.0),
        ("prompt_tokens_1k", 0.4),
        ("seconds", 0.75),
    ],
)
def test_amounts_by_hand(name: str, amount: float) -> None:
    assert read_meters(ROLLOUT, [name], lambda _: 12) == {name: pytest.approx(amount)}


def test_seconds_are_those_of_tools_and_of_other_models() -> None:
    rollout = used(tool_s={"search": 0.25}, reply_s=2.0)
    assert read_meters(rollout, ["seconds"], None) == {"seconds": 0.25}
    assert read_meters(replace(rollout, answered_by="expert"), ["seconds"], None) == {"seconds": 2.25}


def test_every_meter_is_worked_out_above() -> None:
    assert set(METERS) == {"seconds"} | {
        f"{name}{k}" for name in ("tokens", "thinking_tokens", "prompt_tokens") for k in ("", "_1k")
    }


PRICES = {
    "usd": {"search": 0.01, "tokens_1k": 0.6, "prompt_tokens_1k": 0.1},
    "seconds": {"seconds": 1.0},
    "effort": {"*": 2.0, "thinking_tokens": 0.5},
}
# calls, meters -> usd, seconds, effort
TABLE: list[tuple[dict[str, int], dict[str, float], tuple[float, float, float]]] = [
    ({}, {}, (0.0, 0.0, 0.0)),
    ({"search": 2}, {}, (0.02, 0.0, 4.0)),
    ({}, {"tokens_1k": 0.05, "prompt_tokens_1k": 0.4}, (0.07, 0.0, 0.0)),
    ({"calculator": 1}, {"seconds": 0.75, "thinking_tokens": 12.0}, (0.0, 0.75, 8.0)),
]


@pytest.mark.parametrize(("calls", "meters", "expected"), TABLE)
def test_one_list_prices_calls_tokens_and_seconds(
    calls: dict[str, int], meters: dict[str, float], expected: tuple[float, float, float]
) -> None:
    cost = build_cost(RouterConfig(prices=PRICES), {})
    usage = replace(RouteUsage.of(calls, FAMILIES), meters=meters)
    assert cost(usage) == pytest.approx(dict(zip(PRICES, expected, strict=True)))


def test_a_rollout_is_metered_only_for_what_the_list_prices() -> None:
    router = RouterConfig(prices={"usd": {"*": 1.0, "tokens": 0.1}})
    cost = build_cost(router, {})
    asked: list[Rollout] = []
    conditioning = Conditioning(router, count_thinking=lambda rollout: asked.append(rollout) or 0)
    assert conditioning.costs_of(cost, used(sampled_tokens=30)) == {"usd": pytest.approx(3.0)}
    assert not asked
    assert isinstance(cost, PricesCost)
    assert cost.meters == ("tokens",)


def test_a_malformed_call_never_costs_a_meter_price() -> None:
    cost = PricesCost(prices={"usd": {"search": 0.25, "tokens": 7.0}})
    assert cost(RouteUsage.of({"unreadable": 1}, FAMILIES)) == {"usd": 0.25}


def test_without_a_tokenizer_the_length_of_thoughts_is_used() -> None:
    rollout = scored(1.0, [REPLY, "<level>1</level><action>go</action>"]).rollout
    step = rollout.steps[0]
    text = step.raw_policy_output or ""
    share = len(text.partition("<think>")[2].partition("</think>")[0]) / len(text)
    assert estimate_thinking(rollout) == pytest.approx(share * len(step.tokens.token_ids))


def old_list(prices: dict[str, Any]) -> dict[str, Any]:
    """A price list as the option of a cost, its place before `router.prices`."""
    return {"cost": "prices", "cost_kwargs": {"prices": prices}}


@pytest.mark.parametrize(
    ("router", "told"),
    [
        ({"prices": {"usd": {"search": -1.0}}}, "prices.usd.search is -1: give a number of at least 0"),
        ({"prices": {"usd": {}}}, "prices.usd is empty"),
        ({"prices": {"usd": {"*": 1.0}}, "cost": "calls"}, "set prices alone"),
        ({"prices": {"usd": {"search": "much"}}}, "prices.usd.search"),
        (old_list({"usd": {"search": -1.0}}), "cost_kwargs.prices.usd.search is -1: give a number of at least 0"),
        (old_list({"usd": {"search": float("inf")}}), "cost_kwargs.prices.usd.search is inf"),
        (old_list({"usd": {}}), "cost_kwargs.prices.usd is empty"),
        (
            {**old_list({"usd": {"*": 1.0, "tokens": 1.0}}), "max_cost": 1.0},
            "max_cost refuses calls and cannot hold the price of tokens in cost_kwargs.prices.usd",
        ),
    ],
)
def test_a_bad_list_is_named_in_one_line(router: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")) as caught:
        build_config(RouterConfig, router, source="router")
    assert "\n" not in str(caught.value)


def test_the_price_of_a_thinking_token_in_every_spelling() -> None:
    cost = PricesCost(prices={"usd": {"thinking_tokens": 0.5, "thinking_tokens_1k": 100.0}, "calls": {"*": 1.0}})
    assert cost.unit_price("usd", "thinking_tokens") == pytest.approx(0.6)
    assert cost.unit_price("calls", "thinking_tokens") == 0.0


def test_a_followed_multiplier_is_the_units_at_its_price() -> None:
    budgets = Budgets([BudgetConfig(unit="usd", limit=1.0, initial=2.0), BudgetConfig(unit="calls", limit=1.0)])
    followed = FollowedMultiplier(budgets, "usd", 0.25)
    assert followed.value == 0.5
    followed.observe([100.0])
    assert not followed.step()
    assert followed.value == 0.5
    budgets.observe({"usd": [3.0], "calls": [0.0]})
    budgets.step()
    assert followed.value == 0.25 * budgets.lambdas["usd"] > 0.5
    assert followed.state_dict() == {}


def test_a_cap_on_calls_is_refused_in_a_unit_that_prices_tokens() -> None:
    prices = {"usd": {"*": 1.0}, "wait": {"*": 1.0, "seconds": 1.0}}
    RouterConfig(prices=prices, max_cost=1.0)
    with pytest.raises(ValueError, match=r"max_cost refuses calls and cannot hold the price of seconds in prices.wait"):
        RouterConfig(prices=prices, max_cost=1.0, budgets=[BudgetConfig(limit=1.0, unit="wait")])
