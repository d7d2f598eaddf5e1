"""Simulated users: by script, by function, by policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from toolwise.envs.interactions import (
    FunctionInteraction,
    PolicyInteraction,
    ScriptedInteraction,
    as_reply,
)
from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy

TALK = [
    Message(role="system", content="Be kind."),
    Message(role="user", content="Book a flight."),
    Message(role="assistant", content="", tool_calls=[ToolCall(name="search", arguments={})]),
    Message(role="tool", content="secret"),
    Message(role="assistant", content="<think>hm</think>Where to?"),
]


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def replies(user: Any, times: int, **kwargs: Any) -> list[tuple[Any, ...]]:
    async def talk() -> list[tuple[Any, ...]]:
        await user.start(**kwargs)
        said = [await user.respond(TALK) for _ in range(times)]
        await user.finish()
        return said

    return run(talk())  # type: ignore[no-any-return]


def test_a_script_is_said_line_by_line_and_ends() -> None:
    said = replies(ScriptedInteraction(["To Rome.", "Thanks."]), 3)
    assert said == [("To Rome.", False, None, {}), ("Thanks.", False, None, {}), ("", True, None, {})]


def test_a_task_brings_its_own_lines() -> None:
    assert replies(ScriptedInteraction(["no"]), 1, lines=["yes"])[0][0] == "yes"
    with pytest.raises(DataError, match="lines must be a list of strings"):
        replies(ScriptedInteraction(), 1, lines="yes")
    with pytest.raises(ConfigError, match="lines must be a list of strings"):
        ScriptedInteraction([1])  # type: ignore[list-item]


def test_a_function_is_a_user_and_gets_what_it_takes_of_the_task() -> None:
    def user(messages: Sequence[Message], query: str) -> str | None:
        return None if len(messages) > 99 else f"{query}? {messages[-1].content}"

    said = replies(FunctionInteraction(user), 1, query="why", ground_truth="not taken")
    assert said == [("why? <think>hm</think>Where to?", False, None, {})]


def test_functions_may_be_async_may_block_and_may_take_everything() -> None:
    async def slow(messages: Sequence[Message], **kwargs: Any) -> tuple[str, bool, float, dict[str, Any]]:
        await asyncio.sleep(0)
        return f"{sorted(kwargs)}", True, 1, {"a": 1}

    def blocking(messages: Sequence[Message]) -> None:
        time.sleep(0.01)

    assert replies(FunctionInteraction(slow), 1, b=1, a=2) == [("['a', 'b']", True, 1.0, {"a": 1})]
    assert replies(FunctionInteraction(blocking), 1) == [("", True, None, {})]


@pytest.mark.parametrize("bad", [3, ("a", True), ("a", 1, None, {}), ("a", True, "much", {}), (None, True, None, {})])
def test_what_is_no_reply_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="return a string, None to end"):
        as_reply(bad)


def test_a_policy_sees_the_conversation_from_the_other_side() -> None:
    seen: list[Sequence[Message]] = []

    def script(messages: Sequence[Message]) -> str:
        seen.append(messages)
        return "To Rome."

    user = PolicyInteraction(ScriptedPolicy(script), "You want to go to $city for $$5, {braces} and $unknown stay.")
    assert replies(user, 1, city="Rome") == [("To Rome.", False, None, {})]
    assert [(m.role, m.content) for m in seen[0]] == [
        ("system", "You want to go to Rome for $5, {braces} and $unknown stay."),
        ("user", "Hi! How can I help you today?"),
        ("assistant", "Book a flight."),
        ("user", "Where to?"),
    ]


def test_a_policy_ends_the_conversation_by_its_mark() -> None:
    user = PolicyInteraction(ScriptedPolicy(lambda messages: "Thanks! ###STOP###"), "…")
    assert replies(user, 1) == [("Thanks!", True, None, {})]
    with pytest.raises(ConfigError, match="stop is empty"):
        PolicyInteraction(ScriptedPolicy([]), "…", stop="")


def test_a_policy_with_sessions_gets_one_a_conversation_with_the_seed() -> None:
    class Sessions(ScriptedPolicy):
        opened: list[tuple[int, bool]]

        def session(self, *, seed: int, do_sample: bool, prompt_ids: Any = None) -> ScriptedPolicy:
            self.opened.append((seed, do_sample))
            return ScriptedPolicy(lambda messages: "from the session")

    policy = Sessions([])
    policy.opened = []
    user = PolicyInteraction(policy, "…", do_sample=False)
    user.set_seed(9)
    assert [said[0] for said in replies(user, 2)] == ["from the session"] * 2
    assert policy.opened == [(9, False)]


def test_a_real_model_can_play_the_user() -> None:
    import torch

    from toolwise.models import load_model
    from toolwise.policies.local import LocalPolicy
    from toolwise.protocols import Sampling

    torch.set_num_threads(1)
    policy = LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=4))
    user = PolicyInteraction(policy, "You want $what.", do_sample=False)
    (first, *_), (second, *_) = replies(user, 2, what="tea")
    assert isinstance(first, str)
    assert first == second
