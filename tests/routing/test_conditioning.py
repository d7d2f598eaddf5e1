"""Router options reach the prompts."""

from __future__ import annotations

import pytest

from toolwise.config.router import RouterConfig
from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.families import RouteAction
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.types import RouteDecision, Task

TOOLS = {"calculator": CalculatorTool({}), "search": SearchTool({})}
TASK = Task(task_id="t", prompt=[Message(role="user", content="How many?")])


def conditioned(config: RouterConfig, route: RouteAction) -> RouteDecision:
    return Conditioning(config, TOOLS).decision(TASK, route, group_id="g", n=1, seed=0, prompt_id="p")


def test_silent_wording_hides_tools_and_keeps_the_prompt() -> None:
    routed = conditioned(RouterConfig(wording="silent"), RouteAction.CALCULATE_FAMILY)
    assert list(routed.prompt) == list(TASK.prompt)
    assert routed.tools == ("calculator",)


def test_soft_routes_list_the_other_family_last() -> None:
    routed = conditioned(RouterConfig(hard=False, wording="silent"), RouteAction.SEARCH_FAMILY)
    assert routed.tools == ("search", "calculator")


def test_families_come_from_the_configuration_then_the_tool_then_labels() -> None:
    labelled = TASK.model_copy(update={"extra_info": {"tool_families": {"search": "OTHER"}}})
    assert Conditioning(tools=TOOLS).families_of(labelled)["search"] == "SEARCH"
    assert Conditioning(RouterConfig(families={"search": "OTHER"}), TOOLS).families_of(TASK)["search"] == "OTHER"


def test_appending_leaves_the_tools_and_forbids_them() -> None:
    routed = conditioned(RouterConfig(conditioning="append"), RouteAction.ANSWER)
    assert routed.tools is None
    assert set(routed.forbidden) == {"calculator", "search"}
    assert (routed.prompt[0].content or "").startswith("How many?")


def test_a_routed_rollouts_calls_cost_what_the_router_says() -> None:
    config = RouterConfig.model_validate({"prices": {"usd": {"search": 0.25, "calculator": 2.0}}})
    price = conditioned(config, RouteAction.SEARCH_FAMILY).price_calls
    assert price is not None
    assert price({"search": 2, "calculator": 1}) == 0.5  # the other family's call was refused: it is free
    assert price({"no such tool": 1}) == 0.25  # an attempt, at the price of the dearest tool of the route


def test_a_family_of_ones_own_can_be_a_tools_option() -> None:
    tools = {"clock": CalculatorTool({"family": "Clock"})}
    routes = [{"name": "a"}, {"name": "b", "families": ["clock"]}]
    own = Conditioning(RouterConfig.model_validate({"routes": routes}), tools)
    assert own.families_of(TASK) == {"clock": "CLOCK"}
    assert own.offered(TASK, "b") == ("clock",)
    with pytest.raises(ConfigError, match="unknown family 'Clock'; use one of SEARCH, CALCULATE, OTHER"):
        Conditioning(RouterConfig(), tools).families_of(TASK)
