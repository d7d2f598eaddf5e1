"""Observations are truncated before they reach the model; rewards and counts are validated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from toolwise.envs.base import BaseEnv
from toolwise.messages import Message
from toolwise.rollout.observation import observation_messages
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.types import Rollout, StopReason, Task
from toolwise.untrusted.bounds import MAX_OBSERVATION_CHARS

TASK = Task(task_id="t", prompt=[Message(role="user", content="?")])


class Speaker:
    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> Any:
        return {"type": "text", "content": "on"}, "on", None, None


class World(BaseEnv):
    """Returns the given observation and reward, once."""

    def __init__(self, said: Any = "ok", reward: Any = 0.0, info: dict[str, Any] | None = None) -> None:
        self.said, self.reward, self.info = said, reward, info or {}

    async def reset(self) -> str:
        return ""

    async def step(self, action: Any) -> Any:
        return self.said, self.reward, True, dict(self.info)


def played(world: World) -> Rollout:
    request = AsyncRolloutRequest(TASK, Speaker(), world, deadline_s=20)
    asyncio.run(request.run())
    return request.to_rollout()


@pytest.mark.parametrize(
    "world",
    [
        World(reward=math.nan),
        World(reward=math.inf),
        World(reward=1e308),
        World(reward=-1e13),
        World(info={"cost": math.nan}),
        World(info={"cost": -1.0}),
        World(info={"cost": math.inf}),
        World(info={"cost": 1e308}),
        World(info={"calls": {"x": math.nan}}),
    ],
    ids=lambda world: f"{world.reward} {world.info}",
)
def test_numbers_that_are_none_end_the_episode_by_name(world: World) -> None:
    done = played(world)
    assert done.stop_reason is StopReason.ENV_FAULT
    assert done.fault is not None
    assert math.isfinite(done.usage.cost)
    assert done.usage.cost >= 0
    assert not done.trainable


def test_what_a_world_says_is_cut() -> None:
    done = played(World(said="x" * (MAX_OBSERVATION_CHARS + 9)))
    said = done.messages[-1].content or ""
    assert said.endswith(" … cut, 9 characters")
    assert done.stop_reason is StopReason.ENV_DONE


def test_messages_are_cut_too_and_have_no_half_characters() -> None:
    long, half = Message(role="tool", content="x" * (MAX_OBSERVATION_CHARS + 1)), Message(role="user", content="\ud800")
    first, second, third = observation_messages([long, half, Message(role="user", content="é")])
    assert (first.content or "").endswith("cut, 1 characters")
    assert (second.content, third.content) == ("\\ud800", "é")


class Wordy(World):
    async def step(self, action: Any) -> Any:
        raise ValueError("x" * 5_000_000)


def test_a_fault_of_any_length_is_kept_in_short() -> None:
    done = played(Wordy())
    assert done.stop_reason is StopReason.ENV_FAULT
    assert len(done.fault or "") < 25_000
    assert "… cut, " in (done.fault or "")
