"""Sets of routes: the default three, a user's own, one per tool; which apply to a task, and what they cost at least."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.config.router import RouterConfig
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.messages import Message
from toolwise.routing.cost import CallsCost, FamilyCost, RouteUsage, build_cost
from toolwise.routing.families import MIXED, ROUTES
from toolwise.routing.prompts import EMPTY_WORDING, condition, load_wording, sort_tools
from toolwise.routing.routes import (
    DEFAULT_ROUTES,
    RouteSet,
    build_routes,
    heuristic_route,
    least_cost,
)
from toolwise.types import Task

FAMILIES = {"search": "SEARCH", "read": "FILES", "grep": "FILES", "calculator": "CALCULATE"}
CONFIG = RouterConfig(
    routes=[
        {"name": "myself"},
        {"name": "files", "families": ["files"], "price": 0.25},
        {"name": "mixed_bag", "tools": ["search", "calculator"], "note": "Use {{ first | join(', ') }}."},
    ],
    families={"read": "Files", "grep": "FILES"},
)
OWN = build_routes(CONFIG)


def task(**fields: Any) -> Task:
    return Task(task_id="t", prompt=[Message(role="user", content="?")], **fields)


def test_without_routes_of_ones_own_there_are_the_default_three() -> None:
    assert build_routes(RouterConfig()) is DEFAULT_ROUTES
    assert DEFAULT_ROUTES.names == ROUTES
    assert DEFAULT_ROUTES.applicable({}) is None


def test_a_route_offers_its_tools_and_those_of_its_families() -> None:
    files, bag = sort_tools(OWN.find("files"), FAMILIES), sort_tools(OWN.find("mixed_bag"), FAMILIES)
    assert (files.first, files.others, files.rest) == (("read", "grep"), (), ("search", "calculator"))
    assert bag.first == ("search", "calculator")
    assert sort_tools(OWN.find("myself"), FAMILIES).rest == tuple(FAMILIES)


@pytest.mark.parametrize("written", ["mixed_bag", "Mixed-Bag", " MIXED_BAG ", 2])
def test_a_route_is_found_in_any_spelling(written: str | int) -> None:
    assert OWN.parse(written) == "mixed_bag"


@pytest.mark.parametrize("written", ["search", "ANSWER", 3, -1, True])
def test_an_unknown_route_is_named_with_the_known_ones(written: Any) -> None:
    with pytest.raises(ToolwiseError, match="use one of myself, files, mixed_bag"):
        OWN.parse(written)


def test_a_route_applies_to_tasks_with_one_of_its_tools() -> None:
    assert OWN.applicable(FAMILIES) is None
    assert OWN.applicable({"calculator": "CALCULATE"}) == (True, False, True)
    assert OWN.applicable({}) == (True, False, False)


def test_a_task_without_any_route_is_an_error() -> None:
    needy = RouteSet(OWN.routes[1:])
    with pytest.raises(ConfigError, match="no route applies to a task with the tools none: add a route without tools"):
        needy.applicable({})
    with pytest.raises(ConfigError, match="no route applies to task t7 with the tools none"):
        needy.applicable({}, "t7")


def test_one_route_per_tool() -> None:
    routes = build_routes(RouterConfig(per_tool=True), ["search", "calculator"])
    assert routes.names == ("ANSWER", "search", "calculator")
    assert routes.applicable({"search": "SEARCH"}) == (True, True, False)
    assert (routes.direct, OWN.direct, DEFAULT_ROUTES.direct) == ("ANSWER", "myself", "ANSWER")


def test_up_to_four_routes_are_tried_alike_and_more_are_sampled() -> None:
    assert [RouterConfig().sampling_of(count) for count in (2, 3, 4, 5, 30)] == ["stratified"] * 3 + ["independent"] * 2
    assert RouterConfig(sampling="stratified").sampling_of(9) == "stratified"


def test_the_least_cost_is_that_of_the_cheapest_routes_that_apply() -> None:
    priced = build_routes(
        RouterConfig(routes=[{"name": "a", "tools": ["search"], "price": 0.1}, {"name": "b", "price": 0.5}])
    )
    assert least_cost(priced, [FAMILIES, {}], "cost") == pytest.approx(0.3)


def test_notes_are_added_to_the_prompt_whatever_the_wording() -> None:
    for path in (None, "silent"):
        wording = load_wording(path, OWN)
        bag = condition([Message(role="user", content="?")], OWN.find("mixed_bag"), FAMILIES, templates=wording)
        assert [m.content for m in bag.messages] == ["Use search, calculator.", "?"]
        assert bag.tools == ("search", "calculator")
    assert load_wording(None, RouteSet(OWN.routes[:2])) is EMPTY_WORDING


def test_a_wording_file_may_name_ones_own_routes(tmp_path: Any) -> None:
    path = tmp_path / "words.toml"
    path.write_text('[chat.files]\nnote = "Read."\n')
    assert load_wording(path, OWN).templates["chat", "files", "note"] == "Read."
    path.write_text('[chat.ANSWER]\nnote = "No."\n')
    with pytest.raises(ConfigError, match="must be 'myself', 'files' or 'mixed_bag'"):
        load_wording(path, OWN)


def test_a_row_is_labelled_by_the_only_route_that_has_its_tools() -> None:
    def label(*names: str) -> str | None:
        return heuristic_route(task(ground_truth=[{"name": name, "arguments": {}} for name in names]), FAMILIES, OWN)

    assert label() == "myself"
    assert label("read", "grep") == "files"
    assert label("search", "calculator") == "mixed_bag"
    assert label("read", "search") == MIXED


def test_families_of_ones_own_have_their_part_of_the_cost() -> None:
    usage = RouteUsage.of({"read": 2, "search": 1}, FAMILIES)
    calls = build_cost(CONFIG.model_copy(update={"cost": "calls"}), {})
    assert isinstance(calls, CallsCost)
    assert calls.units == ("cost", "search", "calculate", "other", "files")
    assert calls(usage) == {"cost": 3.0, "search": 1.0, "calculate": 0.0, "other": 0.0, "files": 2.0}
    changes = {"cost": "family", "cost_kwargs": {"families": {"files": 0.5}}}
    family = build_cost(CONFIG.model_copy(update=changes), {})
    assert isinstance(family, FamilyCost)
    assert family(usage)["cost"] == 1.5


def test_a_price_without_a_unit_is_in_the_first_unit_of_the_cost() -> None:
    changes = {"cost": "prices", "cost_kwargs": {"prices": {"usd": {"*": 0.01}, "seconds": {"*": 1.0}}}}
    assert build_routes(CONFIG.model_copy(update=changes)).find("files").price == {"usd": 0.25}
    assert OWN.find("files").price == {"cost": 0.25}


@pytest.mark.parametrize("tools", [["Search", "search"], ["web_search", "web-search"], ["answer"], ["otc"]])
def test_tools_whose_routes_could_not_be_told_apart_are_refused(tools: list[str]) -> None:
    with pytest.raises(ConfigError, match="per_tool makes a route of each tool, but"):
        build_routes(RouterConfig(per_tool=True), tools)


def test_the_recorded_price_is_in_the_first_unit_of_the_cost() -> None:
    router = RouterConfig.model_validate(
        {
            "cost": "prices",
            "cost_kwargs": {"prices": {"usd": {"*": 1.0}, "seconds": {"*": 2.0}}},
            "routes": [{"name": "short"}, {"name": "long", "note": "Think.", "price": {"seconds": 5.0, "usd": 0.02}}],
        }
    )
    short, long = build_routes(router)
    assert (short.price.get(short.first_unit, 0.0), long.price.get(long.first_unit, 0.0)) == (0.0, 0.02)


def test_an_old_name_gives_way_to_the_new_one() -> None:
    assert RouterConfig.model_validate({"routes": "one", "sampling": "stratified"}).sampling == "stratified"
    assert RouterConfig.model_validate({"routes": "one"}).sampling == "one"


def test_a_budget_window_with_a_route_per_tool_says_how_to_sample() -> None:
    with pytest.raises(ValueError, match="budget_window needs the outcome of every route"):
        RouterConfig(budget_window=100, per_tool=True)
    RouterConfig(budget_window=100, per_tool=True, sampling="stratified")


def test_the_same_tools_in_another_order_are_the_same_route() -> None:
    with pytest.raises(ValueError, match="the routes 'a' and 'b' do the same"):
        RouterConfig(routes=[{"name": "a", "tools": ["x", "y"]}, {"name": "b", "tools": ["y", "x", "x"]}])
