"""Text actions: what a text environment receives from the model output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.envs.base import BaseEnv
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.parsers import parse_action, render_action
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.types import Task


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>go north</action>", "go north"),
        ("I will go. <action>\n go north\n</action> Now.", "go north"),
        ("<ACTION>go north</Action>", "go north"),
        ("<action>go north", "go north"),
        ("<action>go north</action", "go north</action"),
        ("<action></action>", ""),
        ("go north", "go north"),
        (" go north\n", "go north"),
        ("go north</action>", "go north</action>"),
        ("<action>go south</action> or <action>go north</action>", "go north"),
        ("<action>go south</action> or <action>go north", "go north"),
        ("the <action> is <action>go north</action>", "go north"),
        ("<think>not <action>go south</action></think><action>go north</action>", "go north"),
        ("not <action>go south</action></think>\n<action>go north</action>", "go north"),
        ("<think>north, then</think> go north", "go north"),
        ("<think>or <action>go south</action>", ""),
        ("<action>dépose la 🦉</action>", "dépose la 🦉"),
    ],
)
def test_the_words_of_the_action(text: str, action: str) -> None:
    assert parse_action(text) == (action, [])


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")).map(str.strip))
def test_what_was_written_is_read_back(action: str) -> None:
    assert parse_action(render_action(action, [])) == (action, [])


def test_calls_have_no_words_here() -> None:
    with pytest.raises(ValueError, match="pass no calls"):
        render_action("go", [ToolCall(name="f")])


class Listening(BaseEnv):
    """Records the actions it receives."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def reset(self) -> str:
        return "You are in a room."

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        self.told.append(action)
        return "You are outside.", 1.0, True, {}


def test_the_world_reads_the_action_and_the_step_keeps_the_whole_text() -> None:
    env, text = Listening(), "<think>north?</think>\n<action>go north</action>"
    task = Task(task_id="t", prompt=[Message(role="user", content="Leave.")])
    worker = RLRolloutWorker(task, ScriptedPolicy([text], parser="action"), env=env)
    steps, _, _ = asyncio.run(worker.run_episode())
    assert env.told == ["go north"]
    assert steps[0].action_taken == {"type": "text", "content": "go north"}
    assert steps[0].raw_policy_output == text
