"""What an agent is told about its budget, and the cap that it is held to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.router import RouterConfig
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ConfigError
from toolwise.messages import Message, ToolCall
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost_cap import BUDGET_SPENT_MESSAGE
from toolwise.routing.prompts import unconditioned
from toolwise.tools.catalog import build_tools
from toolwise.types import RouteDecision, Task

TOOLS = build_tools(["calculator", "search"])
TASK = Task(task_id="t", prompt=[Message(role="system", content="Be brief."), Message(role="user", content="2 * 3?")])


def decide(budget: float | None = None, *, task: Task = TASK, **router: Any) -> RouteDecision:
    settings = {"cost": "calls", "budgets": [{"limit": 0.4}], **router}
    conditioning = Conditioning(RouterConfig.model_validate(settings), TOOLS)
    return conditioning.decision(task, "CALCULATE-FAMILY", group_id="g", n=1, seed=0, prompt_id="p", budget=budget)


def answers(decision: RouteDecision, *turns: int) -> list[str]:
    """The results of turns with so many calls each."""

    async def play() -> list[str]:
        env: Any = ToolEnv(TASK, TOOLS, offered=decision.tools)
        env = env if decision.wrap_env is None else decision.wrap_env(env)
        await env.reset()
        texts: list[str] = []
        for calls in turns:
            made = [ToolCall(id=str(i), name="calculator", arguments={"expression": "2 * 3"}) for i in range(calls)]
            observation, _, _, _ = await env.step({"type": "tool_call", "tool_calls": made})
            texts += [message.content or "" for message in observation]
        await env.close()
        return texts

    return asyncio.run(play())


def test_nothing_is_said_or_wrapped_by_default() -> None:
    decision = decide()
    assert decision.wrap_env is None
    assert [m.content for m in decision.prompt][-1] == "2 * 3?"


@pytest.mark.parametrize(
    ("router", "budget", "line"),
    [
        ({}, None, "Budget: 0.4 on average."),
        ({}, 0.7, "Budget: 0.7 on average."),
        ({"max_cost": 2.0}, None, "Budget: 0.4 on average, at most 2."),
        ({"prices": {"calls": {"*": 1.0}}, "cost": "tools", "budgets": [{"limit": 1, "unit": "calls"}]}, None,
         "Budget: 1 calls on average."),
    ],
)  # fmt: skip
def test_the_line_is_appended_to_the_last_message(router: dict[str, Any], budget: float | None, line: str) -> None:
    decision = decide(budget, budget_prompt=True, **router)
    plain = decide(budget, **{k: v for k, v in router.items() if k != "max_cost"})
    assert [m.content for m in decision.prompt][:-1] == [m.content for m in plain.prompt][:-1]
    assert decision.prompt[-1].content == f"2 * 3?\n\n{line}"
    assert [m.content for m in unconditioned(decision.prompt)] == ["Be brief.", "2 * 3?"]


def test_it_follows_the_text_of_the_route_if_that_is_appended_too() -> None:
    decision = decide(budget_prompt=True, conditioning="append")
    assert (decision.prompt[-1].content or "").endswith("\n\nBudget: 0.4 on average.")
    assert [m.content for m in unconditioned(decision.prompt)] == ["Be brief.", "2 * 3?"]


def test_results_say_what_is_left() -> None:
    capped = decide(budget_prompt=True, max_cost=3.0)
    assert answers(capped, 1, 2) == ["6\nBudget left: 2.", "6", "6\nBudget left: 0."]
    assert answers(decide(budget_prompt=True), 1) == ["6\nBudget left: 0."]
    assert answers(decide(2.0, budget_prompt=True), 1) == ["6\nBudget left: 1."]


def test_the_cap_holds_every_episode_and_the_mean_budget_none() -> None:
    assert answers(decide(max_cost=1.0), 2, 1) == ["6", BUDGET_SPENT_MESSAGE, BUDGET_SPENT_MESSAGE]
    assert answers(decide(budget_prompt=True), 2)[0] == "6"


def test_texts_of_your_own(tmp_path: Path) -> None:
    own = tmp_path / "wording.toml"
    own.write_text('[budget]\nprompt = "You have {{ left }}."\n')
    assert decide(budget_prompt=True, wording=str(own)).prompt[-1].content == "2 * 3?\n\nYou have 0.4."
    own.write_text('[budget]\nleft = "{{ lefft }}"\n')
    with pytest.raises(ConfigError, match=r"budget\.left: 'lefft' is undefined"):
        decide(budget_prompt=True, wording=str(own))


@pytest.mark.parametrize(("asked", "held"), [(None, 1), (3.0, 1), (0.0, 0)])
def test_a_question_can_only_lower_the_cap_of_training(asked: float | None, held: int) -> None:
    conditioning = Conditioning(RouterConfig(cost="calls", max_cost=1.0), TOOLS)
    decision = conditioning.decision(TASK, "CALCULATE-FAMILY", group_id="g", n=1, seed=0, prompt_id="p", max_cost=asked)
    assert answers(decision, 2) == ["6"] * held + [BUDGET_SPENT_MESSAGE] * (2 - held)
