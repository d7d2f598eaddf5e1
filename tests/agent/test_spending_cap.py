"""The spending cap with real tools and prices, and the error that the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from toolwise.agent.spending_cap import BUDGET_SPENT_MESSAGE, OVER_BUDGET, CappedEnv
from toolwise.envs.tool_env import ToolEnv
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.routing.cost import AnyCost, CallsCost
from toolwise.routing.families import Family
from toolwise.routing.usage import RouteUsage
from toolwise.tools.catalog import build_tools
from toolwise.types import Rollout, StopReason, Task

FAMILIES = {"calculator": Family.CALCULATE, "search": Family.SEARCH}
TASK = Task(task_id="t", prompt=[{"role": "user", "content": "?"}])


def each_call(calls: Mapping[str, int]) -> float:
    return CallsCost()(RouteUsage.of(calls, FAMILIES))["cost"]


def call(number: int, expression: str = "1 + 1") -> ToolCall:
    return ToolCall(id=f"c{number}", name="calculator", arguments={"expression": expression})


def run(env_of: Any, steps: list[list[ToolCall]]) -> tuple[list[Any], CappedEnv]:
    async def work() -> tuple[list[Any], CappedEnv]:
        env = env_of(ToolEnv(TASK, build_tools(["calculator", "search"])))
        await env.reset()
        out = [await env.step({"type": "tool_call", "tool_calls": calls}) for calls in steps]
        await env.close()
        return out, env

    return asyncio.run(work())


def test_calls_within_the_cap_are_executed_and_others_refused_in_order() -> None:
    steps = [[call(0)], [call(1, "2 + 3"), call(2), call(3)]]
    (first, second), env = run(lambda inner: CappedEnv(inner, 2, each_call), steps)
    assert [m.content for m in first[0]] == ["2"]
    assert [m.content for m in second[0]] == ["5", BUDGET_SPENT_MESSAGE, BUDGET_SPENT_MESSAGE]
    assert [m.tool_call_id for m in second[0]] == ["c1", "c2", "c3"]
    assert second[3]["failed_calls"] == {OVER_BUDGET: 2}
    assert second[3]["calls"] == {"calculator": 1}
    assert second[3]["is_action_valid"] is False
    assert env.refused == 2


def test_a_cap_of_zero_refuses_everything_without_a_step() -> None:
    ((observation, reward, done, info),), _ = run(lambda inner: CappedEnv(inner, 0, each_call), [[call(0)]])
    assert [m.content for m in observation] == [BUDGET_SPENT_MESSAGE]
    assert (reward, done, info.get("cost")) == (None, False, None)


def test_where_any_number_of_calls_costs_the_same_the_second_is_free() -> None:
    steps = [[call(0)], [call(1), call(2)]]
    outs, env = run(lambda inner: CappedEnv(inner, 1, lambda c: AnyCost()(RouteUsage.of(c, FAMILIES))["cost"]), steps)
    assert [m.content for out in outs for m in out[0]] == ["2", "2", "2"]
    assert env.refused == 0


def test_an_answer_is_passed_on_and_ends_the_episode() -> None:
    ((observation, _, done, _),), _ = run(lambda inner: CappedEnv(inner, 0, each_call), [[]])
    assert (list(observation), done) == ([], True)


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "20 + 3"}}\n</tool_call>'


@pytest.mark.parametrize(("cap", "served"), [(0.0, 0), (1.0, 1), (9.0, 2)])
def test_an_episode_can_still_answer_after_a_refusal(cap: float, served: int) -> None:
    async def work() -> Rollout:
        policy = ScriptedPolicy([CALL, CALL, "Answer: 23"], parser="hermes")
        env = CappedEnv(ToolEnv(TASK, build_tools(["calculator"])), cap, each_call)
        request = AsyncRolloutRequest(TASK, policy, env)
        await request.run()
        return request.to_rollout()

    rollout = asyncio.run(work())
    tools = [m for m in rollout.messages if m.role == "tool"]
    assert [m.content for m in tools] == ["23"] * served + [BUDGET_SPENT_MESSAGE] * (2 - served)
    assert rollout.stop_reason is StopReason.ANSWERED
    assert rollout.usage.calls.get("calculator", 0) == served
    assert rollout.usage.failed_calls.get(OVER_BUDGET, 0) == 2 - served
    assert rollout.usage.cost == served
    assert isinstance(rollout.messages[-1], Message)
