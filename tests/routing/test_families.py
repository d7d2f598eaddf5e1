"""Families of tools: precedence, rules, and the row labels that follow from them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from toolwise.data.rlla_rows import gold_calls
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.messages import Message
from toolwise.routing.families import (
    MIXED,
    ROUTES,
    Family,
    RouteAction,
    declared_family,
    families_of_task,
    family_of,
    family_of_call,
    gold_call_names,
    heuristic_target,
    parse_target,
    tool_descriptions,
)
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import build_tools
from toolwise.tools.function import FAMILIES, tool
from toolwise.types import Task

SEARCH, CALCULATE, OTHER = Family.SEARCH, Family.CALCULATE, Family.OTHER


@tool
def look_up_city(city: str) -> str:
    """Looks up a city in the register."""
    return city


@tool(family="OTHER")
def search_party(city: str) -> str:
    """Searches for people, by sending some."""
    return city


def task_with(text: str = "hello", **fields: Any) -> Task:
    return Task(task_id="t", prompt=[Message(role="user", content=text)], **fields)


def rlla_task(*tools: tuple[str, str], ground_truth: Any = None) -> Task:
    entries = "\n".join(f"{i}. Name: {n}\nDescription: {d}\nParameters: {{}}" for i, (n, d) in enumerate(tools, 1))
    system = f"**Available Tools**\nIn your response, you can use the following tools:\n{entries}\n\n**Steps**"
    prompt = [Message(role="system", content=system), Message(role="user", content="hi")]
    return Task(task_id="t", prompt=prompt, ground_truth=ground_truth)


def test_the_families_are_those_that_tools_carry() -> None:
    assert tuple(Family) == FAMILIES


@pytest.mark.parametrize(
    ("name", "description", "family"),
    [
        ("web_search", "", SEARCH),
        ("T1LidfQ", "Fetches an Instagram media download link for a given post.", SEARCH),
        ("earnings", "This function retrieves the earnings information for a given company.", SEARCH),
        ("si_0kdhbc", "Performs a search using the Zenserp API and returns the results page.", SEARCH),
        ("getForecast", "", SEARCH),
        ("median", "Calculates the median of a list of numbers.", CALCULATE),
        ("age_calculator", "", CALCULATE),
        ("uFcwOv", "Finds the duplicate number in a list of integers.", CALCULATE),
        ("simplify", "Simplifies a basic mathematical symbolic expression.", CALCULATE),
        ("zySgxa", "Estimating the derivative of a function at a given point.", CALCULATE),
        ("send_mail", "Sends a mail.", OTHER),
        ("addTextOverlay", "Add a text overlay to an image", OTHER),
        ("generate_password", "Generates a random password of specified length.", OTHER),
        ("", "", OTHER),
    ],
)
def test_rules(name: str, description: str, family: Family) -> None:
    assert family_of(name, description) is family


def test_the_verb_comes_before_the_object() -> None:
    assert family_of("x", "Retrieves a list of integers from the database.") is SEARCH
    assert family_of("x", "Finds a list of integers that sum up to a target.") is CALCULATE


def test_words_are_whole_words() -> None:
    assert family_of("budgets", "Forgets the widgets") is OTHER


def test_only_declared_families_count_as_declared() -> None:
    tools = build_tools(["calculator", "search", {"name": "python", "family": "OTHER"}, look_up_city])
    assert declared_family(tools["calculator"]) is CALCULATE
    assert declared_family(tools["search"]) is SEARCH
    assert declared_family(tools["python"]) is OTHER
    assert declared_family(search_party) is OTHER
    assert declared_family(look_up_city) is None


def test_an_attribute_set_on_one_tool_is_a_declaration() -> None:
    made = build_tools([{"name": look_up_city, "price": 2.0}])["look_up_city"]
    assert declared_family(made) is None
    made.family = "CALCULATE"
    assert declared_family(made) is CALCULATE


def test_precedence() -> None:
    tools: dict[str, BaseTool] = {"look_up_city": look_up_city, "search_party": search_party}
    task = task_with()
    assert families_of_task(task, tools) == {"look_up_city": SEARCH, "search_party": OTHER}
    labels = {"look_up_city": "CALCULATE", "search_party": "CALCULATE"}
    assert families_of_task(task, tools, None, labels) == {"look_up_city": CALCULATE, "search_party": OTHER}
    overrides = {"look_up_city": OTHER, "search_party": "search"}
    assert families_of_task(task, tools, overrides, labels) == {"look_up_city": OTHER, "search_party": SEARCH}


def test_only_the_tools_that_a_task_offers_count() -> None:
    tools = build_tools(["calculator", "search"])
    assert families_of_task(task_with(tools=["search"]), tools) == {"search": SEARCH}
    assert list(families_of_task(task_with(tools=["search", "calculator"]), tools)) == ["search", "calculator"]
    assert families_of_task(task_with(tools=[]), tools) == {}
    assert families_of_task(task_with("1. Name: a\nDescription: Searches\nParameters: {}"), {}) == {}


def test_tools_of_a_text_block_count_too() -> None:
    task = rlla_task(("a b", "Searches it"), ("c", "Computes it"), ("d", "Sends it"), ("c", "Searches it"))
    assert tool_descriptions(task, {}) == {"a b": "Searches it", "c": "Computes it", "d": "Sends it"}
    assert families_of_task(task) == {"a b": SEARCH, "c": CALCULATE, "d": OTHER}
    assert families_of_task(task, None, {"d": "SEARCH"}, {"c": "OTHER", "d": "OTHER"}) == {
        "a b": SEARCH,
        "c": OTHER,
        "d": SEARCH,
    }


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown family 'LOOK'"):
        families_of_task(rlla_task(("a", "b")), None, {"a": "LOOK"})


def test_a_name_cut_at_its_bracket_still_matches() -> None:
    families = {"DAX Points (2022)": CALCULATE}
    assert family_of_call("DAX Points (2022)", families) is CALCULATE
    assert family_of_call("DAX Points ", families) is CALCULATE
    assert family_of_call("DAX", families) is OTHER
    assert family_of_call("search_web", families) is SEARCH
    assert family_of_call("", families) is OTHER
    assert family_of_call("  ", families) is OTHER


def gold(*names: str) -> str:
    lines = "\n".join(f'{{"name": "{name}", "parameters": {{}}}}' for name in names)
    return f"<think> so </think>\n<tool_call>\n{lines}\n</tool_call>"


@pytest.mark.parametrize(
    ("ground_truth", "target"),
    [
        ("<think> a <tool_call> is not needed </think>\n<response> yes </response>", RouteAction.ANSWER),
        (gold("find"), RouteAction.SEARCH_FAMILY),
        (gold("find", "find", "send"), RouteAction.SEARCH_FAMILY),
        (gold("reckon"), RouteAction.CALCULATE_FAMILY),
        (gold("reckon", "find"), MIXED),
        (gold("send"), MIXED),
        ([{"name": "reckon", "arguments": {}}], RouteAction.CALCULATE_FAMILY),
        ([], RouteAction.ANSWER),
        ("reckon(a=1)", RouteAction.CALCULATE_FAMILY),
        ("42", None),
        ("Paris", None),
        (None, None),
    ],
)
def test_a_row_is_labelled_by_its_gold_calls(ground_truth: Any, target: Any) -> None:
    task = rlla_task(("find", "Searches"), ("reckon", "Computes"), ("send", "Sends"), ground_truth=ground_truth)
    assert heuristic_target(task) == target


@pytest.mark.parametrize(
    ("plan", "target"),
    [
        ([["find", "x"]], RouteAction.SEARCH_FAMILY),
        ([["find", "x"], ["reckon", "1 + 1"]], MIXED),
        ([["send"]], MIXED),
        ([], None),
        ("find", None),
        ([["find"], 3], None),
    ],
)
def test_a_plan_gives_the_calls_if_the_ground_truth_is_an_answer(plan: Any, target: Any) -> None:
    task = rlla_task(("find", "Searches"), ("reckon", "Computes"), ("send", "Sends"), ground_truth="42")
    assert heuristic_target(task.model_copy(update={"extra_info": {"plan": plan}})) == target
    told = task.model_copy(update={"extra_info": {"plan": plan}, "ground_truth": gold("reckon")})
    assert heuristic_target(told) is RouteAction.CALCULATE_FAMILY  # the ground truth comes first


def test_labels_of_tools_change_labels_of_rows() -> None:
    task = rlla_task(("find", "Searches"), ground_truth=gold("find"))
    assert heuristic_target(task, {"find": CALCULATE}) is RouteAction.CALCULATE_FAMILY


def test_the_480_rows(rlla_tasks: list[Task]) -> None:
    """The numbers in docs/routing.md."""
    calls: Counter[Family] = Counter()
    tools: Counter[Family] = Counter()
    for task in rlla_tasks:
        families = families_of_task(task)
        tools.update(families.values())
        calls.update(family_of_call(call["name"], families) for call in gold_calls(task.ground_truth))
    targets = Counter(heuristic_target(task) for task in rlla_tasks)
    assert tools == {SEARCH: 1024, CALCULATE: 252, OTHER: 205}
    assert calls == {SEARCH: 468, CALCULATE: 125, OTHER: 106}
    assert targets == {
        RouteAction.SEARCH_FAMILY: 279,
        RouteAction.CALCULATE_FAMILY: 76,
        RouteAction.ANSWER: 63,
        MIXED: 62,
    }


def test_every_gold_row_has_calls(rlla_tasks: list[Task]) -> None:
    assert sum(len(gold_call_names(task.ground_truth) or ()) for task in rlla_tasks) == 699
    assert all(gold_call_names(task.ground_truth) is not None for task in rlla_tasks)


def test_routes_are_in_the_order_of_the_logits() -> None:
    assert [route.value for route in ROUTES] == ["ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"]
    assert [route.index for route in ROUTES] == [0, 1, 2]


@pytest.mark.parametrize(
    ("written", "route"),
    [
        ("ANSWER", RouteAction.ANSWER),
        ("SEARCH-FAMILY", RouteAction.SEARCH_FAMILY),
        ("SEARCH_FAMILY", RouteAction.SEARCH_FAMILY),
        (" search ", RouteAction.SEARCH_FAMILY),
        ("calculate_family", RouteAction.CALCULATE_FAMILY),
        ("calculate", RouteAction.CALCULATE_FAMILY),
        (RouteAction.CALCULATE_FAMILY, RouteAction.CALCULATE_FAMILY),
        (1, RouteAction.SEARCH_FAMILY),
    ],
)
def test_every_spelling_is_read(written: str | int, route: RouteAction) -> None:
    assert RouteAction.parse(written) is route
    assert parse_target(written) is route


def test_a_route_is_written_as_the_files_have_it() -> None:
    assert json.dumps({"router_target_action": RouteAction.SEARCH_FAMILY}) == (
        '{"router_target_action": "SEARCH-FAMILY"}'
    )


def test_mixed_is_a_label_and_not_a_route() -> None:
    assert parse_target("mixed") == MIXED
    with pytest.raises(ToolwiseError, match="unknown route 'MIXED'; use one of ANSWER, SEARCH-FAMILY"):
        RouteAction.parse(MIXED)


@pytest.mark.parametrize("written", ["family", "", "SEARCHFAMILY", 3, -1, True])
def test_unknown_routes_are_refused(written: str | int) -> None:
    with pytest.raises(ToolwiseError, match="unknown route"):
        RouteAction.parse(written)
    with pytest.raises(ToolwiseError, match="or MIXED"):
        parse_target(written)
