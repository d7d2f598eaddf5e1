"""Tools and a simulated user in one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from toolwise.envs.base import BaseEnv
from toolwise.envs.interactions import BaseInteraction, FunctionInteraction, InteractiveEnv, Reply, ScriptedInteraction
from toolwise.envs.methods_env import MethodsEnv
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ConfigError
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.tools import build_tools
from toolwise.types import StopReason, Task

TASK = Task(task_id="t", prompt=[Message(role="user", content="2 + 2?")], interaction_kwargs={"lines": ["And 3 + 3?"]})
SUM = '<tool_call>{"name": "calculator", "arguments": {"expression": "3 + 3"}}</tool_call>'


class User(BaseInteraction):
    """Records the calls to it."""

    def __init__(self, *replies: Any, opening: str | None = None, finish: Exception | None = None) -> None:
        self.log: list[Any] = []
        self.replies = list(replies)
        self.opening, self.fault = opening, finish

    def set_seed(self, seed: int) -> None:
        self.log.append(("seed", seed))

    async def start(self, **interaction_kwargs: Any) -> str | None:
        self.log.append(("start", interaction_kwargs))
        return self.opening

    async def respond(self, messages: Sequence[Message]) -> Reply:
        self.log.append(("respond", [f"{m.role}: {m.content}" for m in messages]))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, tuple) else (reply, False, None, {})

    async def finish(self) -> None:
        self.log.append("finish")
        if self.fault:
            raise self.fault


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def an_env(user: BaseInteraction, task: Task = TASK, **options: Any) -> InteractiveEnv:
    return InteractiveEnv(ToolEnv(task, build_tools(["calculator"])), user, task, **options)


def say(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def roll_out(env: BaseEnv, lines: Sequence[str], task: Task = TASK) -> RLRolloutWorker:
    worker = RLRolloutWorker(task, ScriptedPolicy(lines), env=env)
    run(worker.run_episode())
    return worker


def test_an_answer_is_not_the_end_the_user_speaks_next() -> None:
    worker = roll_out(an_env(ScriptedInteraction()), ["4", SUM, "6"])
    assert [(m.role, m.content) for m in worker.messages] == [
        ("user", "2 + 2?"),
        ("assistant", "4"),
        ("user", "And 3 + 3?"),
        ("assistant", ""),
        ("tool", "6"),
        ("assistant", "6"),
    ]
    assert worker.stop_reason is StopReason.ANSWERED
    assert worker.usage.calls == {"calculator": 1}


def test_the_user_hears_everything_from_the_prompt_on() -> None:
    user = User("more", ("bye", True, 0.5, {"mood": "good"}), opening="Hello.")
    worker = roll_out(an_env(user, kwargs={"tone": "dry", "lines": ["overruled"]}), ["one", SUM, "two"])
    said = [entry for entry in user.log if entry[0] != "seed"]
    assert said[:2] == [
        ("start", {"tone": "dry", "lines": ["And 3 + 3?"]}),
        ("respond", ["user: 2 + 2?", "user: Hello.", "assistant: one"]),
    ]
    assert said[2][1][3:] == ["user: more", "assistant: ", "tool: 6", "assistant: two"]
    assert said[3:] == ["finish"]
    assert worker.messages[-1].content == "bye"
    assert [step.base_reward for step in worker.steps] == [None, None, 0.5]
    assert worker.steps[-1].step_info["interaction"] == {"mood": "good"}


def test_out_of_turns_is_truncated() -> None:
    worker = roll_out(an_env(User("a", "b", "c"), max_user_turns=2), ["1", "2", "3"])
    assert worker.stop_reason is StopReason.ENV_TRUNCATED
    assert [m.content for m in worker.messages] == ["2 + 2?", "1", "a", "2", "b", "3"]
    assert worker.steps[-1].step_info["user_turns"] == 2


@pytest.mark.parametrize(
    "bad", [RuntimeError("gone"), ("", False, None, {}), (3, True, None, {}), ("a", True, float("nan"), {})]
)
def test_a_failing_user_is_an_environment_error(bad: Any) -> None:
    user = User(bad)
    worker = roll_out(an_env(user), ["1"])
    assert worker.stop_reason is StopReason.ENV_FAULT
    assert not worker.stop_reason.trainable
    assert user.log[-1] == "finish"


def test_a_slow_user_is_an_environment_error() -> None:
    async def slow(messages: Sequence[Message]) -> str:
        await asyncio.sleep(60)
        return ""

    worker = roll_out(an_env(FunctionInteraction(slow), timeout_s=0.05), ["1"])
    assert worker.stop_reason is StopReason.ENV_FAULT
    assert "the simulated user: respond took longer than 0.05 s" in (worker.fault or "")


def test_both_are_closed_once_even_if_one_fails() -> None:
    class Door(ToolEnv):
        closed = 0

        async def close(self) -> None:
            Door.closed += 1
            await super().close()

    user = User(finish=OSError("stuck"))

    async def live() -> None:
        env = InteractiveEnv(Door(TASK, {}), user, TASK)
        await env.reset()
        with pytest.raises(OSError, match="stuck"):
            await env.close()
        await env.close()

    run(live())
    assert user.log.count("finish") == 1
    assert Door.closed == 2


def test_a_user_who_never_began_is_not_finished() -> None:
    user = User()
    run(an_env(user).close())
    assert user.log == []


def test_phases_are_told_before_the_step() -> None:
    env = an_env(User())
    assert env.phase_of(say("hi")) == "interaction"
    assert env.phase_of({"type": "tool_call", "tool_calls": [ToolCall(name="calculator")]}) == "tool"
    assert env.env.phase_of(say("hi")) == "tool"


def test_the_seed_reaches_both() -> None:
    class Dice:
        def roll(self) -> int:
            """Rolls."""
            return 4

        def reset(self, seed: int) -> str:
            return f"seed {seed}"

    user = User()

    async def live() -> list[Message]:
        env = InteractiveEnv(MethodsEnv(Dice), user, TASK)
        env.set_seed(5)
        seen = await env.reset()
        await env.close()
        return seen

    assert [m.content for m in run(live())] == ["seed 5"]
    assert user.log[0] == ("seed", 5)


def test_state_keys_combine_the_environment_and_the_request() -> None:
    class Counter:
        def __init__(self) -> None:
            self.n = 0

        def add(self) -> int:
            """Adds."""
            self.n += 1
            return self.n

    async def keys() -> list[str | None]:
        env = InteractiveEnv(MethodsEnv(Counter), User("again"), TASK)
        await env.reset()
        found = [env.state_key]
        await env.step({"type": "tool_call", "tool_calls": [ToolCall(name="add")]})
        found.append(env.state_key)
        await env.step(say("1"))
        found.append(env.state_key)
        await env.close()
        return found

    assert len(set(run(keys()))) == 3
    assert an_env(User()).state_key is None


def test_a_text_environment_cannot_have_a_user() -> None:
    class Text(BaseEnv):
        async def reset(self) -> str:
            return ""

        async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
            return "", None, False, {}

    with pytest.raises(ConfigError, match="Text takes every text as an action"):
        InteractiveEnv(Text(), User(), TASK)


def test_the_route_of_a_turn_rules_out_tools_beside_a_user_too() -> None:
    env = an_env(User("Thanks."))
    env.forbid_tools(["calculator"])
    assert env.refuses("calculator")
    messages = roll_out(env, [SUM, "6", "Bye."]).messages
    assert "error: calculator is not to be used in this turn; tools: none" in [m.content for m in messages]
