"""Episodes with a route for every turn: what is refused when, and that the conversation only grows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from toolwise.envs.tool_env import ToolEnv
from toolwise.messages import Message, ToolCall
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.rollout.turn_request import TurnRoutedRequest
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.types import Rollout, RouteDecision, StopReason, Task, TurnRoute

TOOLS: Any = {"calculator": CalculatorTool({})}
TASK = Task(task_id="t", prompt=[Message(role="user", content="What is 971 * 490?")])


class Turns:
    """Routes that are given; remembers what it read."""

    def __init__(self, *routes: TurnRoute) -> None:
        self.routes = routes
        self.prompts: list[list[int]] = []

    async def route(
        self, turn: int, messages: Sequence[Message], prompt_ids: Sequence[int], rollout_offset: int
    ) -> TurnRoute:
        self.prompts.append(list(prompt_ids))
        return self.routes[min(turn, len(self.routes) - 1)]


class FailingTurns(Turns):
    async def route(self, *arguments: Any) -> TurnRoute:
        raise ValueError("the head is broken")


@pytest.fixture(scope="module")
def policy() -> LocalPolicy:
    torch.set_num_threads(1)
    model, chat = load_model("builtin:small", device="cpu")
    return LocalPolicy(model, chat, Sampling(max_new_tokens=32))


def roll_out(policy: Any, turns: Turns) -> Rollout:
    scheduler = RolloutScheduler(policy, TOOLS, max_episode_steps=3)
    decision = RouteDecision(TASK, "g", 1, 0, TASK.prompt, turns=turns)
    (rollout,) = asyncio.run(scheduler.roll_out([decision], do_sample=False))
    return rollout


def test_each_turn_reads_exactly_the_tokens_that_it_is_generated_from(policy: LocalPolicy) -> None:
    turns = Turns(TurnRoute(0, "CALCULATE"))
    rollout = roll_out(policy, turns)
    assert len(rollout.steps) > 1
    assert [list(step.tokens.prompt_ids) for step in rollout.steps] == turns.prompts
    for step, following in zip(rollout.steps, rollout.steps[1:], strict=False):
        seen = [*step.tokens.prompt_ids, *step.tokens.token_ids]
        assert list(following.tokens.prompt_ids)[: len(seen)] == seen


def test_tools_are_refused_in_one_turn_and_run_in_the_next(policy: LocalPolicy) -> None:
    rollout = roll_out(policy, Turns(TurnRoute(0, "ANSWER", forbidden=("calculator",)), TurnRoute(1, "CALCULATE")))
    first, *_ = rollout.steps
    assert first.step_info["failed_calls"] == {"forbidden_tool": 1}
    assert first.step_info["cost"] == 0.0
    assert [turn.route for turn in rollout.turn_routes][:2] == ["ANSWER", "CALCULATE"]
    assert "forbidden_tool" not in (rollout.steps[1].step_info.get("failed_calls") or {})


def test_a_note_is_part_of_the_conversation_and_of_the_prompt(policy: LocalPolicy) -> None:
    noted = Message(role="user", content="What is 971 * 490? Answer at once.")
    turns = Turns(TurnRoute(0, "ANSWER", message=noted, bans_calls=True))
    rollout = roll_out(policy, turns)
    assert rollout.messages[0] == noted
    assert len(rollout.steps[0].tokens.prompt_ids) > len(turns.prompts[0])


def test_a_banned_call_is_never_begun_and_the_next_turn_is_free_again(policy: LocalPolicy) -> None:
    banned = roll_out(policy, Turns(TurnRoute(0, "ANSWER", bans_calls=True, max_new_tokens=4)))
    assert not banned.usage.calls
    assert len(banned.steps[0].tokens.token_ids) <= 4
    assert roll_out(policy, Turns(TurnRoute(0, "CALCULATE"))).usage.calls


def test_a_router_that_fails_ends_its_episode_only(policy: LocalPolicy) -> None:
    rollout = roll_out(policy, FailingTurns())
    assert rollout.stop_reason is StopReason.POLICY_FAULT
    assert "the head is broken" in (rollout.fault or "")


def test_a_policy_without_tokens_cannot_be_routed_at_every_turn() -> None:
    class Plain:
        async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
            return {"type": "text", "content": "4"}, "4", None, None

    rollout = roll_out(Plain(), Turns(TurnRoute(0, "ANSWER")))
    assert rollout.stop_reason is StopReason.POLICY_FAULT
    assert "needs the model of this process" in (rollout.fault or "")


def test_an_environment_forbids_other_tools_at_every_turn() -> None:
    async def play() -> list[str | None]:
        env = ToolEnv(TASK, TOOLS)
        await env.reset()
        texts = []
        for forbidden in (("calculator",), ()):
            env.forbid_tools(forbidden)
            call = ToolCall(id="c", name="calculator", arguments={"expression": "2 + 2"})
            messages, _, _, _ = await env.step({"tool_calls": [call]})
            texts.append(messages[0].content)
        await env.close()
        return texts

    refused, answered = asyncio.run(play())
    assert refused is not None
    assert "not to be used" in refused
    assert answered == "4"


def test_requests_of_a_route_for_the_whole_prompt_stay_plain(policy: LocalPolicy) -> None:
    scheduler = RolloutScheduler(policy, TOOLS)
    (plain,) = scheduler.requests([RouteDecision(TASK, "g", 1, 0, TASK.prompt)])
    (routed,) = scheduler.requests([RouteDecision(TASK, "g", 1, 0, TASK.prompt, turns=Turns())])
    assert not isinstance(plain, TurnRoutedRequest)
    assert isinstance(routed, TurnRoutedRequest)
