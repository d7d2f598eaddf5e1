"""Router options reach the prompts."""

from __future__ import annotations

from toolwise.config.router import RouterConfig
from toolwise.messages import Message
from toolwise.routing.actions import RouteAction
from toolwise.routing.options import Conditioning
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.types import Task

TOOLS = {"calculator": CalculatorTool({}), "search": SearchTool({})}
TASK = Task(task_id="t", prompt=[Message(role="user", content="How many?")])


def test_silent_wording_hides_tools_and_keeps_the_prompt() -> None:
    routed = Conditioning(RouterConfig(wording="silent"))(TASK, RouteAction.CALCULATE_FAMILY, TOOLS)
    assert list(routed.messages) == list(TASK.prompt)
    assert routed.tools == ("calculator",)


def test_soft_routes_list_the_other_family_last() -> None:
    routed = Conditioning(RouterConfig(hard=False, wording="silent"))(TASK, RouteAction.SEARCH_FAMILY, TOOLS)
    assert routed.tools == ("search", "calculator")


def test_families_come_from_the_configuration_then_the_tool_then_labels() -> None:
    labelled = TASK.model_copy(update={"extra_info": {"tool_families": {"search": "OTHER"}}})
    assert Conditioning().families_of(labelled, TOOLS)["search"] == "SEARCH"
    assert Conditioning(RouterConfig(families={"search": "OTHER"})).families_of(TASK, TOOLS)["search"] == "OTHER"


def test_appending_leaves_the_tools_and_forbids_them() -> None:
    routed = Conditioning(RouterConfig(conditioning="append"))(TASK, RouteAction.ANSWER, TOOLS)
    assert routed.tools is None
    assert set(routed.forbidden) == {"calculator", "search"}
    assert (routed.messages[0].content or "").startswith("How many?")
