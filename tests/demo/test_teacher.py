"""The noisy teacher: its strategies, and conversations with real tool results."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from random import Random
from typing import Any

import pytest
from selection import quick_first
from small_world_teacher import STRATEGIES, TOOL_OFFERS, conversations, demonstrate

from toolwise.demo.tasks import KINDS, make_row, make_rows
from toolwise.messages import Message
from toolwise.tools.base import BaseTool
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.tools.schema import validate_arguments

BOTH = ["calculator", "search"]
TALKS = conversations(300, seed=0)


def demonstrations(
    kind: str, offered: list[str], count: int = 200
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    rng = Random(1)

    async def make() -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        rows = [make_row(kind, rng, index, "teach") for index in range(count)]
        return [(row, await demonstrate(row, offered, rng)) for row in rows]

    return asyncio.run(make())


def answer_of(messages: list[dict[str, Any]]) -> str:
    found = re.fullmatch(r"Answer: (\d+)", messages[-1]["content"])
    assert found
    return found[1]


def calls_of(messages: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for message in messages
        for call in message.get("tool_calls") or ()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_plans_of_a_kind_sum_to_one(kind: str) -> None:
    assert set(STRATEGIES) == set(KINDS)
    assert sum(weight for _, weight in STRATEGIES[kind]) == pytest.approx(1.0, abs=1e-9)
    assert all(weight > 0 for _, weight in STRATEGIES[kind])
    known = {"right", "guess", "settle", "misreport", "half", "detour settle", "detour right", "detour guess"}
    assert {plan for plan, _ in STRATEGIES[kind]} <= known


def test_the_offers_sum_to_one() -> None:
    assert sum(weight for _, weight in TOOL_OFFERS) == pytest.approx(1.0, abs=1e-9)


def test_half_way_is_only_for_what_has_two_steps() -> None:
    assert {kind for kind, plans in STRATEGIES.items() if "half" in dict(plans)} <= {"two_step"}


def test_every_conversation_begins_with_a_question_and_ends_with_an_answer() -> None:
    for talk in TALKS:
        messages = talk["messages"]
        assert messages[0]["role"] == "user"
        assert sum(m["role"] == "user" for m in messages) == 1
        answer_of(messages)
        for message in messages:
            Message.model_validate(message)


def test_each_call_is_followed_by_its_own_result() -> None:
    for talk in TALKS:
        middle = talk["messages"][1:-1]
        ids = []
        for call, result in zip(middle[::2], middle[1::2], strict=True):
            assert (call["role"], result["role"]) == ("assistant", "tool")
            [made] = call["tool_calls"]
            assert made["id"] == result["tool_call_id"]
            ids.append(made["id"])
        assert len(set(ids)) == len(ids)


def test_only_tools_on_offer_are_called_and_with_arguments_that_fit_their_schemas() -> None:
    tools: dict[str, BaseTool] = {"calculator": CalculatorTool({}), "search": SearchTool({})}
    called: Counter[str] = Counter()
    for talk in TALKS:
        offered = [schema["function"]["name"] for schema in talk["tools"]]
        for name, arguments in calls_of(talk["messages"]):
            assert name in offered
            assert not validate_arguments(tools[name].tool_schema, arguments)
            called[name] += 1
    assert called["search"]
    assert called["calculator"]


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_what_the_real_tools_say(kind: str) -> None:
    async def say(row: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:
        tool: BaseTool = SearchTool({}) if name == "search" else CalculatorTool({})
        instance = await tool.create(**(row["extra_info"]["tools_kwargs"].get(name, {}).get("create_kwargs", {})))
        text, _, _ = await tool.execute(instance, arguments)
        await tool.release(instance)
        return text

    async def check() -> int:
        seen = 0
        for row, messages in made:
            results = [m["content"] for m in messages if m["role"] == "tool"]
            for (name, arguments), result in zip(calls_of(messages), results, strict=True):
                assert result == await say(row, name, arguments)
                seen += 1
        return seen

    made = demonstrations(kind, BOTH, 60)
    assert asyncio.run(check()) > 0


@pytest.mark.parametrize("kind", quick_first(KINDS, ["lookup"]))
def test_the_teacher_is_right_as_often_as_its_plans_say(kind: str) -> None:
    right = sum(weight for plan, weight in STRATEGIES[kind] if plan.split()[-1] in ("right", "settle"))
    made = demonstrations(kind, BOTH, 600)
    share = sum(answer_of(m) == row["reward_model"]["ground_truth"] for row, m in made) / len(made)
    assert share == pytest.approx(right, abs=0.08)


def test_the_teacher_calls_as_often_as_its_plans_say() -> None:
    for kind in ("lookup", "arithmetic"):
        none = dict(STRATEGIES[kind])["guess"]
        made = demonstrations(kind, BOTH, 600)
        share = sum(not calls_of(m) for _, m in made) / len(made)
        assert share == pytest.approx(none, abs=0.08)


def test_half_way_answers_what_was_found_so_far() -> None:
    half = [
        (row, messages)
        for row, messages in demonstrations("two_step", BOTH)
        if [name for name, _ in calls_of(messages)] == ["search"]
    ]
    assert half
    for _, messages in half:
        assert answer_of(messages) in re.findall(r"\d+", messages[2]["content"])


@pytest.mark.parametrize(
    ("kind", "offered"), [("lookup", ["calculator"]), ("arithmetic", ["search"]), ("two_step", [])]
)
def test_without_the_tool_that_settles_it_the_teacher_guesses(kind: str, offered: list[str]) -> None:
    for row, messages in demonstrations(kind, offered, 30):
        assert calls_of(messages) == []
        assert answer_of(messages) != row["reward_model"]["ground_truth"]


def test_what_it_knows_it_says_without_tools() -> None:
    for row, messages in demonstrations("known", [], 30):
        assert answer_of(messages) == row["reward_model"]["ground_truth"]


def test_a_row_is_left_alone() -> None:
    for row in make_rows(10, seed=5, split="teach"):
        before = repr(row)
        asyncio.run(demonstrate(row, BOTH, Random(0)))
        assert repr(row) == before


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert conversations(10, seed=0) == TALKS[:10]
    assert conversations(10, seed=1) != TALKS[:10]
