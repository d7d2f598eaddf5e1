"""From usage to cost, in one unit or several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from toolwise.config.router import RouterConfig
from toolwise.data.rlla_rows import gold_calls
from toolwise.errors import ConfigError
from toolwise.messages import Message, ToolCall
from toolwise.routing.cost import (
    COSTS,
    UNREADABLE,
    AnyCost,
    CallsCost,
    Cost,
    FamilyCost,
    PricesCost,
    RouteUsage,
    build_cost,
    tool_calls_in,
    usage_of,
    usage_of_messages,
)
from toolwise.routing.families import Family, families_of_task
from toolwise.tools.catalog import build_tools
from toolwise.types import Rollout, StepData, StopReason, Task, Usage

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


def test_a_malformed_call_costs_as_much_as_the_most_expensive_tool_that_could_be_called() -> None:
    cost = PricesCost(prices={"usd": {"search": 0.01, "calculator": 3.0, "*": 1.0}})
    garbled = {UNREADABLE: 1}
    assert cost(RouteUsage.of(garbled, FAMILIES))["usd"] == 3.0
    assert cost(RouteUsage.of(garbled, FAMILIES, offered=["search", "mail"]))["usd"] == 1.0
    assert cost(RouteUsage.of(garbled, FAMILIES, offered=["search"]))["usd"] == 0.01
    others = PricesCost(prices={"usd": {"search": 0.01, "*": 1.0}})
    assert others(RouteUsage.of(garbled, FAMILIES))["usd"] == 1.0


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


SEARCH, CALCULATE, OTHER = Family.SEARCH, Family.CALCULATE, Family.OTHER
TASK_FAMILIES = {"search": SEARCH, "calculator": CALCULATE, "mail": OTHER}


def reply(text: str) -> Message:
    return Message(role="assistant", content=text)


def rollout_of(
    *replies: str, calls: Mapping[str, int] | None = None, actions: list[dict[str, Any]] | None = None
) -> Rollout:
    history = [Message(role="assistant", content='<tool_call>{"name": "mail", "arguments": {}}</tool_call>')]
    task = Task(task_id="t", prompt=[*history, Message(role="user", content="hi")])
    steps = [
        StepData(
            system_step_index=i,
            observation_data=None,
            action_taken={"type": "text"},
            raw_policy_output=reply,
            resulting_messages_history=[],
        )
        for i, reply in enumerate(replies)
    ] + [
        StepData(system_step_index=i, observation_data=None, action_taken=action, resulting_messages_history=[])
        for i, action in enumerate(actions or [])
    ]
    return Rollout(
        rollout_id="r",
        group_id="g",
        batch_data_id=0,
        rollout_offset=0,
        task=task,
        route=None,
        steps=tuple(steps),
        messages=task.prompt,
        stop_reason=StopReason.ANSWERED,
        usage=Usage(calls=dict(calls or {})),
    )


def test_calls_are_counted_by_tool_and_by_family() -> None:
    usage = usage_of(rollout_of(calls={"search": 2, "calculator": 1, "mail": 3}), TASK_FAMILIES)
    assert usage.calls_by_tool == {"search": 2, "calculator": 1, "mail": 3}
    assert usage.calls == {SEARCH: 2, CALCULATE: 1, OTHER: 3}
    assert usage.used_any_tool


@pytest.mark.parametrize(
    ("calls", "flags"),
    [
        ({}, (False, False, False)),
        ({"search": 1}, (True, True, False)),
        ({"calculator": 2}, (True, False, True)),
        ({"mail": 1}, (True, False, False)),
    ],
)
def test_what_was_used_follows_from_the_calls(calls: dict[str, int], flags: tuple[bool, bool, bool]) -> None:
    usage = usage_of(rollout_of(calls=calls), TASK_FAMILIES)
    assert (usage.used_any_tool, usage.calls[SEARCH] > 0, usage.calls[CALCULATE] > 0) == flags


def test_refused_calls_do_not_count_and_malformed_ones_do() -> None:
    calls = {"search": 1, "calculator": 2, "nonsense": 1, UNREADABLE: 3}
    whole = usage_of(rollout_of(calls=calls), TASK_FAMILIES)
    assert whole.calls_by_tool == {"search": 1, "calculator": 2, UNREADABLE: 4}
    routed = usage_of(rollout_of(calls=calls), TASK_FAMILIES, allowed=("search", "mail"))
    assert routed.calls_by_tool == {"search": 1, UNREADABLE: 4}
    malformed = usage_of(rollout_of(calls={UNREADABLE: 1}), TASK_FAMILIES, allowed=())
    assert malformed.used_any_tool
    nothing = usage_of(rollout_of(calls={"search": 4}), TASK_FAMILIES, allowed=())
    assert not nothing.used_any_tool


TEXT = '<think> a <tool_call> </think>\n<tool_call>\n{"name": "search", "parameters": {}}\n</tool_call>'
DESCRIBED = Message(role="system", content="1. Name: search\nDescription: Searches\nParameters: {}")


def test_text_is_read_where_the_prompt_describes_its_tools() -> None:
    """Whatever the parser made of it: nothing executes, so nothing was refused either."""
    for calls in ({}, {"search": 1}):
        spoken = rollout_of(TEXT, calls=calls)
        spoken.task.prompt = [DESCRIBED, *spoken.task.prompt]
        usage = usage_of(spoken, TASK_FAMILIES, allowed=())
        assert usage.calls == {SEARCH: 1, CALCULATE: 0, OTHER: 0}


def test_otherwise_only_executed_calls_count() -> None:
    """Not, for example, a call in the last turn, which is never executed."""
    assert not usage_of(rollout_of(TEXT), TASK_FAMILIES).used_any_tool
    both = rollout_of(TEXT, calls={"calculator": 1})
    assert usage_of(both, TASK_FAMILIES).calls_by_tool == {"calculator": 1}
    assert usage_of(both, TASK_FAMILIES, source="executed").calls_by_tool == {"calculator": 1}
    assert usage_of(both, TASK_FAMILIES, source="text").calls_by_tool == {"search": 1}


def test_calls_in_the_prompt_are_not_the_rollouts() -> None:
    assert not usage_of(rollout_of("no"), TASK_FAMILIES, source="text").used_any_tool


def test_a_policy_without_text_is_read_by_its_actions() -> None:
    action = {"type": "tool_call", "content": "", "tool_calls": [ToolCall(name="search")]}
    rollout = rollout_of(actions=[action, {"type": "text", "content": "done"}])
    assert usage_of(rollout, TASK_FAMILIES, source="text").calls_by_tool == {"search": 1}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<think> I use <tool_call> </think>\n<response> no </response>", {}),
        ("plain words", {}),
        ("", {}),
        ('<tool_call>\n{"name": "search", "parameters": {}}\n{"name": "calculator", "parameters": {}}\n</tool_call>',
         {"search": 1, "calculator": 1}),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call><tool_call>{"name": "search", "arguments": {}}'
         "</tool_call>", {"search": 2}),
        ('<tool_call>\n{"name": "search", "parameters": {"q": "a"}', {UNREADABLE: 1}),
        ('<tool_call>\n{"name": "search", "parameters": {}}\nnot json\n</tool_call>', {"search": 1, UNREADABLE: 1}),
        ('<tool_call>\n{"name": "search", "parameters": {}}', {"search": 1}),
        ("<tool_call>\n</tool_call>", {UNREADABLE: 1}),
        ("<tool_call>[1, 2]</tool_call>", {UNREADABLE: 1}),
        ('[TOOL_CALLS] [{"name": "search", "arguments": {}}]', {"search": 1}),
    ],
)  # fmt: skip
def test_every_block_is_an_attempt_to_use_a_tool(text: str, calls: dict[str, int]) -> None:
    usage = usage_of_messages([reply(text)], TASK_FAMILIES)
    assert usage.calls_by_tool == calls
    assert usage.used_any_tool == bool(calls)


def test_unreadable_calls_have_no_family() -> None:
    usage = usage_of_messages([reply("<tool_call>oops</tool_call>")], TASK_FAMILIES)
    assert usage.calls == {SEARCH: 0, CALCULATE: 0, OTHER: 1}


def test_a_tool_that_was_not_offered_is_classified_by_its_name() -> None:
    usage = usage_of_messages([reply('<tool_call>{"name": "web_search", "parameters": {}}</tool_call>')], {})
    assert usage.calls[SEARCH] == 1


def test_parsed_calls_of_a_message_come_first() -> None:
    messages = [
        Message(role="user", content='<tool_call>{"name": "mail", "parameters": {}}</tool_call>'),
        Message(role="assistant", content="<tool_call>no</tool_call>", tool_calls=[ToolCall(name="search")]),
    ]
    assert usage_of_messages(messages, TASK_FAMILIES).calls_by_tool == {"search": 1}
    assert tool_calls_in(messages[1])[0].name == "search"


def test_the_gold_answers_of_480_rows(rlla_tasks: list[Task]) -> None:
    for task in rlla_tasks:
        families = families_of_task(task)
        usage = usage_of_messages([reply(task.ground_truth)], families)
        wanted = gold_calls(task.ground_truth)
        assert sum(usage.calls_by_tool.values()) == len(wanted)
        assert usage.used_any_tool == bool(wanted)
        assert set(usage.calls_by_tool) == {call["name"] for call in wanted}


def test_no_calls_is_a_usage_too() -> None:
    assert RouteUsage() == RouteUsage.of({"search": 0}, TASK_FAMILIES)
