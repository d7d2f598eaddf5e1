"""Checks before the first step: rows without a ground truth, routers without a choice."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosis_cases import config, scored, task, too_long

from toolwise.data.task_set import TaskSet
from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.rewards.combine import CompositeReward, WeightedReward
from toolwise.rewards.executor import episode_reward
from toolwise.rewards.function import Reward
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import build_tools
from toolwise.tools.function import tool
from toolwise.training.diagnosis import check_family_names, check_routable, evaluation_findings, startup_findings
from toolwise.types import Task


def compares(messages: Any, ground_truth: Any) -> float:
    return float(messages[-1].content == ground_truth)


def ignores(messages: Any, _ground_truth: Any) -> float:
    return 1.0


def takes_answer(messages: Any, ground_truth: Any, answer: str) -> float:
    return float(messages[-1].content == answer)


def takes_source(messages: Any, ground_truth: Any, data_source: str) -> float:
    return 1.0


def takes_any(messages: Any, ground_truth: Any, **kwargs: Any) -> float:
    return 1.0


def rewards(*functions: Any) -> CompositeReward:
    return CompositeReward(tuple(WeightedReward(f if isinstance(f, Reward) else Reward.of(f)) for f in functions))


def kinds(tasks: list[Task], *functions: Any) -> list[str]:
    return [finding.name for finding in startup_findings(config(), rewards(*functions), {}, train=tasks)]


ANSWERS = [task("a", reward_kwargs={"answer": "4"}), task("b", reward_kwargs={"answer": "5", "level": 1})]


def test_a_column_named_answer_is_named_with_its_cure() -> None:
    (finding,) = startup_findings(config(), rewards(compares), {}, train=ANSWERS)
    assert (finding.name, finding.step) == ("no_ground_truth", 0)
    assert "None on all 2 training rows" in finding.says
    assert "prompt, answer, level" in finding.says
    assert 'Set data.columns = { ground_truth = "answer" }' in finding.cure
    assert "def score(messages, ground_truth, answer)" in finding.cure


@pytest.mark.parametrize("column", ["gold_answer", "label", "Solution", "groundtruth", "expected"])
def test_columns_that_look_like_an_answer(column: str) -> None:
    assert kinds([task(reward_kwargs={column: "4"})], compares) == ["no_ground_truth"]
    assert kinds([task(reward_kwargs={column: "4"})], takes_any) == ["no_ground_truth"]


def test_a_single_unused_column_is_assumed_to_be_the_answer() -> None:
    assert kinds([task(reward_kwargs={"bridges": 107})], compares) == ["no_ground_truth"]
    assert kinds([task(reward_kwargs={"bridges": 107})], takes_any) == []


def test_an_answer_in_extra_info_is_found_too() -> None:
    (finding,) = startup_findings(config(), rewards(compares), {}, train=[task(extra_info={"answer": "4", "index": 1})])
    assert "Move extra_info.answer to a column ground_truth" in finding.cure


@pytest.mark.parametrize(
    ("tasks", "function"),
    [
        ([task(ground_truth="4", reward_kwargs={"answer": "4"})], compares),
        ([task("a", data_source="chat"), task("b", data_source="math", ground_truth="6")], takes_source),
        ([*ANSWERS, task("c", ground_truth="6")], ignores),
        ([*ANSWERS, task("c", ground_truth="6")], takes_answer),
        (ANSWERS, ignores),
        (ANSWERS, takes_answer),
        (ANSWERS, episode_reward("env")),
        ([task()], compares),  # the rows have no other column: the reward may not need a ground truth
        ([task(reward_kwargs={"level": 1, "source": "x"})], compares),
        ([], compares),
    ],
)
def test_no_false_alarm_about_ground_truths(tasks: list[Task], function: Any) -> None:
    assert kinds(tasks, function) == []


def test_rows_of_one_file_without_a_ground_truth_are_counted_and_named() -> None:
    rows = [task(f"a/row-{i}", reward_kwargs={"answer": "4"}) for i in range(3)]
    rows += [task(f"b/row-{i}", ground_truth="4") for i in range(2)]
    for tasks in (rows, TaskSet(parts=(rows[:3], rows[3:]))):
        (finding,) = startup_findings(config(), rewards(compares), {}, train=tasks, held_out=rows[2:])
        assert finding.says == (
            "ground_truth is None on 3 of 5 training rows (3 like a/row-0) and on 1 of 3 held-out rows (1 like a/row-2)"
            ", but compares takes it; the columns are: prompt, answer"
        )
        assert finding.cure == 'Set data.columns = { ground_truth = "answer" }'


def test_a_single_row_without_a_ground_truth_needs_no_other_column() -> None:
    rows = [task("a", ground_truth="4"), task("b"), task("c", ground_truth="5")]
    (finding,) = startup_findings(config(), rewards(compares), {}, train=rows)
    assert "None on 1 of 3 training rows (1 like b)" in finding.says
    assert finding.cure.startswith("Give these rows a ground_truth, or leave them out")
    (finding,) = startup_findings(config(), rewards(compares), {}, train=[rows[0]], held_out=[rows[1]])
    assert "None on all 1 held-out rows" in finding.says  # the training rows show that the reward needs it


def test_only_the_first_kinds_of_rows_are_named() -> None:
    rows = [task(f"{name}/0", reward_kwargs={"answer": "4"}) for name in "abcde"]
    (finding,) = startup_findings(config(), rewards(compares), {}, train=[*rows, task("z", ground_truth="4")])
    assert "5 of 6 training rows (1 like a/0, 1 like b/0, 1 like c/0, …)" in finding.says


def test_held_out_rows_are_looked_at_as_well() -> None:
    train = [task(ground_truth="4")]
    (finding,) = startup_findings(config(), rewards(compares), {}, train=train, held_out=ANSWERS)
    assert "held-out rows" in finding.says


def test_an_evaluation_reports_both() -> None:
    found = evaluation_findings(rewards(compares), ANSWERS, [scored(), too_long()])
    assert [finding.name for finding in found] == ["no_ground_truth", "prompt_too_long"]


# Routers.


@tool
def fetch_page(url: str) -> str:
    """Does something."""
    return url


@tool(family="SEARCH")
def lookup(name: str) -> str:
    """Does something else."""
    return name


def routed(tools: dict[str, BaseTool], **router: Any) -> list[str]:
    settings = config(router={"enable": True, **router})
    found = startup_findings(settings, rewards(compares), tools, train=[task(ground_truth="4")])
    return [f"{finding.name} {finding.says} {finding.cure}" for finding in found]


def test_a_router_whose_tools_are_all_of_one_family() -> None:
    tools = build_tools([fetch_page, lookup])
    families = {"fetch_page": "OTHER", "lookup": "OTHER"}
    (said,) = routed(tools, families=families)
    assert said.startswith("one_family All tools (fetch_page, lookup) are of the family OTHER")
    assert "offer the same tools" in said
    assert 'router.families = { fetch_page = "SEARCH" }' in said
    (said,) = routed(tools, families={"fetch_page": "SEARCH"})
    assert "the route to calculate offers no tool" in said
    (said,) = routed({"lookup": tools["lookup"]})
    assert "Add a tool of another family" in said
    assert routed(tools, families={"fetch_page": "CALCULATE"}) == []


def test_families_are_those_of_all_tasks_together() -> None:
    tools = build_tools(["calculator", "search"])
    tasks = [task("a", ground_truth="4", tools=["calculator"]), task("b", ground_truth="4", tools=["search"])]
    settings = config(router={"enable": True})
    assert startup_findings(settings, rewards(compares), tools, train=tasks) == []
    (finding,) = startup_findings(settings, rewards(compares), tools, train=tasks[:1])
    assert finding.name == "one_family"


@pytest.mark.parametrize(
    ("tools", "tasks", "sections", "said"),
    [
        ([], [task()], {}, "there are no tools: a router chooses between tools; add some to `tools`"),
        (["search"], [task(tools=[])], {}, "no task offers any of them"),
        (["search"], [task()], {"multi_turn": {"enable": False}}, "multi_turn.enable = true"),
    ],
)
def test_a_router_without_tools_is_refused(
    tools: list[str], tasks: list[Task], sections: dict[str, Any], said: str
) -> None:
    settings = config(router={"enable": True}, **sections)
    with pytest.raises(ConfigError, match=r"router\.enable is true") as caught:
        check_routable(settings, build_tools(tools), tasks)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_router_with_tools_is_not() -> None:
    check_routable(config(router={"enable": True}), build_tools(["search"]), [task(tools=[]), task()])
    check_routable(config(), {}, [task()])


def test_rows_that_are_only_evaluated_may_lack_the_tools_of_a_route() -> None:
    look_up = {"name": "look-up", "tools": ["search"]}
    routes = [{"name": "plain", "price": 0.7}, look_up]
    settings = config(router={"enable": True, "routes": routes, "budgets": [{"limit": 0.5}]})
    tools, rows = build_tools(["search", "calculator"]), [task(tools=["calculator"])]
    with pytest.raises(ConfigError, match="names the tool 'search', but the tools of the tasks are: calculator"):
        check_routable(settings, tools, rows)
    check_routable(settings, tools, rows, learns=False)
    check_routable(config(router={"enable": True}), tools, [task(tools=[])], learns=False)
    none = config(router={"enable": True, "routes": [look_up, {"name": "dates", "families": ["CLOCK"]}]})
    with pytest.raises(ConfigError, match=f"no route applies to task {rows[0].task_id} with the tools calculator"):
        check_routable(none, tools, rows, learns=False)


def test_a_training_row_that_no_route_applies_to_is_named() -> None:
    look_up = {"name": "look-up", "tools": ["search"]}
    routes = [look_up, look_up | {"name": "in-short", "note": "Be brief."}]
    rows = [task("a", tools=["search"]), task("b", tools=["calculator"])]
    with pytest.raises(ConfigError, match="no route applies to task b with the tools calculator"):
        check_routable(config(router={"enable": True, "routes": routes}), build_tools(["search", "calculator"]), rows)


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ({"usd": {"serch": 1.0, "*": 1.0}}, "has a price for 'serch', which is neither a tool of the tasks (search"),
        ({"usd": {"calculater": 1.0, "*": 1.0}}, "; did you mean 'calculator'?"),
        ({"usd": {"search": 1.0}}, "the tool 'calculator' has no price: add it to a table of router.prices"),
        ({"usd": {"tokens": 1.0}}, "the tool 'search' has no price"),
    ],
)
def test_a_price_list_names_what_the_tasks_have(prices: dict[str, Any], said: str) -> None:
    tools = build_tools(["search", "calculator"])
    with pytest.raises(ConfigError) as caught:
        check_routable(config(router={"enable": True, "prices": prices}), tools, [task()])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    old = {"cost": "prices", "cost_kwargs": {"prices": prices}}
    with pytest.raises(ConfigError) as caught:
        check_routable(config(router={"enable": True, **old}), tools, [task()])
    assert said.replace("router.prices", "router.cost_kwargs.prices") in str(caught.value)


def test_prices_are_checked_for_estimators_that_compare_costs() -> None:
    tools, router = build_tools(["search", "calculator"]), {"prices": {"usd": {"serch": 1.0, "*": 1.0}}}
    check_routable(config(router=router), tools, [task()])
    with pytest.raises(ConfigError, match="has a price for 'serch'"):
        check_routable(config(router=router, algorithm={"adv_estimator": "hdpo"}), tools, [task()])


def test_a_tool_that_is_named_like_a_meter_is_refused() -> None:
    search, described = build_tools(["search"])["search"], [task(tools=["seconds"])]
    settings = config(router={"enable": True, "prices": {"s": {"seconds": 1.0}}})
    with pytest.raises(ConfigError, match=r"router\.prices\.s\.seconds is the price of what .* rename the tool"):
        check_routable(settings, {"seconds": search}, described)


@pytest.mark.parametrize(
    "prices",
    [
        {"usd": {"search": 1.0}, "calls": {"CALCULATE": 1.0}},
        {"s": {"seconds": 1.0}},
        {"usd": {"*": 0.0, "tokens": 1.0}},
    ],
)
def test_a_price_list_may_name_families_and_meters(prices: dict[str, Any]) -> None:
    tools = build_tools(["search", "calculator"])
    check_routable(config(router={"enable": True, "prices": prices}), tools, [task()])


def test_families_name_tools_that_exist() -> None:
    tools, system = build_tools(["search"]), "**Available Tools**\n1. Name: find\nDescription: Finds.\nParameters: {}"
    described = Task(task_id="r", prompt=[Message(role="system", content=system), Message(role="user", content="?")])
    families = {"search": "SEARCH", "find": "SEARCH"}
    check_family_names(config(router={"enable": True, "families": families}), tools, [task(), described])
    check_family_names(config(router={"families": {"serach": "SEARCH"}}), tools, [task()])  # no router is trained
    for name, hint in (("serach", "did you mean 'search'?"), ("xyz", "correct the name")):
        misspelt = config(router={"enable": True, "families": {name: "SEARCH"}})
        with pytest.raises(
            ConfigError, match=rf"router\.families names the tool '{name}'.*\(tools: search\)"
        ) as caught:
            check_family_names(misspelt, tools, [task()])
        assert hint in str(caught.value)
        assert "\n" not in str(caught.value)


def test_tools_that_a_prompt_describes_are_tools() -> None:
    system = "**Available Tools**\n1. Name: find\nDescription: Finds things.\nParameters: {}"
    described = Task(task_id="r", prompt=[Message(role="system", content=system), Message(role="user", content="?")])
    check_routable(config(router={"enable": True}, multi_turn={"enable": False}), {}, [described])
