"""A trial validates return values strictly and describes each problem in one line."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolwise.checks.env.env_trial import EnvSnapshot, EnvTrial, EnvViolation, as_action, open_trial
from toolwise.envs.base import BaseEnv
from toolwise.messages import Message, ToolCall


class World(BaseEnv):
    def __init__(self, step: Any = ("seen", 0.5, False, {}), *, key: Any = "k", reset: Any = "start") -> None:
        self.given, self.key, self.first, self.closed = step, key, reset, 0

    async def reset(self) -> Any:
        return self.first

    async def step(self, action: Any) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    async def close(self) -> None:
        self.closed += 1
        if self.closed > 1:
            raise OSError("closed already")

    @property
    def state_key(self) -> Any:
        return self.key


def problems(world: World) -> list[str]:
    async def live() -> list[str]:
        async with open_trial(world, 5) as trial:
            await trial.reset(0)
            await trial.step("go")
        return trial.problems

    return asyncio.run(live())


@pytest.mark.parametrize(
    "step",
    [
        ("seen", None, True, {}),
        ([], 1, False, {"truncated": False}),
        ([Message(role="tool", content="x")], -2.5, False, {"a": [1]}),
        ([{"role": "user", "content": "x"}], 0, False, {}),
    ],
)
def test_answers_that_fit(step: Any) -> None:
    assert problems(World(step)) == []


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ((None, 0.0, False, {}), "the observation is None"),
        ((3, 0.0, False, {}), "the observation is 3"),
        (("", True, False, {}), "the reward is True"),
        (("", float("nan"), False, {}), "the reward is nan"),
        (("", "1", False, {}), "the reward is '1'"),
        (("", 0.0, 1, {}), "done is 1"),
        (("", 0.0, False, None), "info is None"),
        (("", 0.0, False, {"truncated": "no"}), "info[\"truncated\"] is 'no'"),
        (("", 0.0, False, {"is_action_valid": 0}), 'info["is_action_valid"] is 0'),
        (("", 0.0, False, {"x": object()}), "info is not JSON-serializable"),
    ],
)
def test_answers_that_do_not(step: Any, said: str) -> None:
    (problem,) = problems(World(step))
    assert problem.startswith("step 1: ")
    assert said in problem


def test_a_state_key_that_is_no_string() -> None:
    assert problems(World(key=3)) == [f"{at}: state_key is 3; use a string or None" for at in ("reset", "step 1")]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            ("", 0.0, False, False, {}),
            'step 1 returned 5 values; return (observation, reward, done, info), with info["tr',
        ),
        ("seen", "step 1 returned 'seen'"),
        (KeyError("a\nb"), "step 1 raised KeyError: 'a\\nb'"),
    ],
)
def test_what_cannot_be_read_at_all(step: Any, said: str) -> None:
    with pytest.raises(EnvViolation) as raised:
        problems(World(step))
    assert str(raised.value).startswith(said)


def test_a_step_that_is_late_and_one_that_is_not_async() -> None:
    class Slow(World):
        async def step(self, action: Any) -> Any:
            await asyncio.sleep(60)

    class Plain(World):
        def step(self, action: Any) -> Any:
            return "", 0.0, False, {}

    async def live(world: World) -> None:
        trial = EnvTrial(world, 0.05)
        await trial.reset(0)
        await trial.step("go")

    with pytest.raises(EnvViolation, match=r"step 1 took longer than 0\.05 s"):
        asyncio.run(live(Slow()))
    with pytest.raises(EnvViolation, match="step 1 is not a coroutine"):
        asyncio.run(live(Plain()))


def test_a_close_that_fails_does_not_hide_what_went_wrong_before() -> None:
    world = World(ValueError("first"))
    world.closed = 1
    with pytest.raises(EnvViolation, match="first"):
        problems(world)


def test_moments_say_in_what_they_differ() -> None:
    assert EnvSnapshot("a").difference(EnvSnapshot("a")) is None
    assert EnvSnapshot("a", 1.0).difference(EnvSnapshot("a", 2.0)) == "reward 1.0 and 2.0"


def test_actions_as_files_write_them() -> None:
    assert as_action("look") == "look"
    one = as_action({"name": "add", "arguments": {"k": 1}})
    assert (one["type"], one["name"]) == ("tool_call", "add")
    assert one["tool_calls"] == [ToolCall(id="call_0", name="add", arguments={"k": 1})]
    two = as_action([{"name": "a"}, {"name": "b"}])
    assert [call.id for call in two["tool_calls"]] == ["call_0", "call_1"]
    assert as_action(one) == one
    assert as_action({"type": "text", "content": "hi"}) == {"type": "text", "content": "hi"}
