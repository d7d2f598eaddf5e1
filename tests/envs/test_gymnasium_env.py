"""Gymnasium environments through text: real ones, and small ones that hang, refuse or end in odd ways."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from toolwise.envs.gymnasium import GymnasiumEnv, check_registered
from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.types import StopReason, Task

LAKE: dict[str, Any] = {"make_kwargs": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "right"]


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def play(env: GymnasiumEnv, *actions: str, seed: int | None = None) -> list[Any]:
    async def episode() -> list[Any]:
        if seed is not None:
            env.set_seed(seed)
        seen: list[Any] = [await env.reset()]
        seen += [await env.step(action) for action in actions]
        await env.close()
        return seen

    return run(episode())  # type: ignore[no-any-return]


class Echo(gymnasium.Env[str, str]):
    """Echoes actions until told to stop."""

    def __init__(self) -> None:
        self.observation_space = spaces.Text(200)
        self.action_space = spaces.Text(20, charset="abcdefghijklmnopqrstuvwxyz ")
        self.closed = 0
        self.gone = threading.Event()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"Say something. ({self.np_random.integers(100)})", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        told = {"cost": 7.0, "calls": {"x": 1}, "array": np.arange(3), "is_success": action == "stop"}
        return f"You said {action}.", 0.5, action == "stop", action == "cut", told

    def close(self) -> None:
        self.closed += 1
        self.gone.set()


def test_frozen_lake_is_walked_by_names_and_numbers() -> None:
    seen = play(GymnasiumEnv("FrozenLake-v1", **LAKE), "down", "1", " RIGHT ", "<think>…</think><action>right</action>")
    assert seen[0] == "0\n\nActions: left (0), down (1), right (2), up (3)."
    assert [observation for observation, *_ in seen[1:]] == ["4", "8", "9", "10"]


def test_the_goal_ends_the_episode_with_its_reward() -> None:
    *_, (_, reward, done, info) = play(GymnasiumEnv("FrozenLake-v1", **LAKE), *TO_THE_GOAL)
    assert (reward, done, info["truncated"], info["is_action_valid"]) == (1.0, True, False, True)


def test_a_time_limit_truncates_and_is_no_end() -> None:
    options = {**LAKE, "make_kwargs": {"is_slippery": False, "max_episode_steps": 2}}
    *_, first, (_, _, done, info) = play(GymnasiumEnv("FrozenLake-v1", **options), "left", "left")
    assert (first[2], first[3]["truncated"]) == (False, False)
    assert (done, info["truncated"]) == (True, True)


def test_an_end_at_the_time_limit_is_an_end() -> None:
    options = {**LAKE, "make_kwargs": {"is_slippery": False, "max_episode_steps": 6}}
    *_, (_, reward, done, info) = play(GymnasiumEnv("FrozenLake-v1", **options), *TO_THE_GOAL)
    assert (reward, done, info["truncated"]) == (1.0, True, False)


@pytest.mark.parametrize("text", ["", "fly", "4", "-1", "１e9", "left or right", "9" * 5000, "{}", "<action></action>"])
def test_an_invalid_action_is_a_message_and_changes_nothing(text: str) -> None:
    env = GymnasiumEnv("FrozenLake-v1", **LAKE)
    _, (observation, reward, done, info), (after, *_) = play(env, text, "down")
    assert observation.startswith("error: ")
    assert "left (0), down (1), right (2), up (3)" in observation
    assert len(observation) < 250
    assert (reward, done, info["is_action_valid"]) == (None, False, False)
    assert after == "4"


def test_a_step_after_the_end_says_done_again() -> None:
    *_, (_, reward, done, info) = play(GymnasiumEnv("FrozenLake-v1", **LAKE), *TO_THE_GOAL, "left")
    assert (reward, done, info["is_action_valid"]) == (None, True, False)


def test_a_seed_names_the_episode() -> None:
    def walk(seed: int) -> list[Any]:
        return play(GymnasiumEnv("FrozenLake-v1"), *"2121210212", seed=seed)

    assert walk(3) == walk(3)
    assert any(walk(3) != walk(other) for other in range(4, 8))


def test_a_tasks_own_seed_goes_before_the_groups() -> None:
    def start(seed: int) -> str:
        return str(play(GymnasiumEnv("Taxi-v4", seed=5), seed=seed)[0])

    assert start(1) == start(2)


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_any_seed_will_do(seed: int) -> None:
    assert play(GymnasiumEnv("Taxi-v4"), seed=seed) == play(GymnasiumEnv("Taxi-v4"), seed=seed)


def test_states_are_named_by_the_observation_or_a_function() -> None:
    async def keys(env: GymnasiumEnv) -> list[str | None]:
        found = [env.state_key]
        await env.reset()
        found.append(env.state_key)
        for action in ("down", "up", "nonsense"):
            await env.step(action)
            found.append(env.state_key)
        await env.close()
        return found

    none, start, below, back, same = run(keys(GymnasiumEnv("FrozenLake-v1", **LAKE)))
    assert none is None
    assert start == back == same != below
    named = GymnasiumEnv("FrozenLake-v1", **LAKE, state_of=lambda world, observation: f"cell {observation}")
    assert run(keys(named))[1:3] == ["cell 0", "cell 4"]


def test_taxi_and_blackjack_are_readable() -> None:
    start, (observation, reward, *_) = play(GymnasiumEnv("Taxi-v4", describe=False), "0", seed=1)
    assert start.isdigit()
    assert observation.isdigit()
    assert reward == -1.0
    hand = play(GymnasiumEnv("Blackjack-v1", actions=["stick", "hit"]), "stick", seed=1)
    assert hand[0] == "[20, 7, 0]\n\nActions: stick (0), hit (1)."
    assert hand[1][2] is True


def test_a_drawing_marks_with_brackets_and_has_no_escape_codes() -> None:
    options = {**LAKE, "make_kwargs": {"is_slippery": False, "render_mode": "ansi"}, "draw": True}
    start = play(GymnasiumEnv("FrozenLake-v1", **options))[0]
    assert "[S]FFF\nFHFH\nFFFH\nHFFG" in start
    assert "\x1b" not in start


def test_an_own_formatter_and_an_own_reader() -> None:
    def read(text: str) -> int:
        if "east" not in text:
            raise ValueError("go east")
        return 2

    env = GymnasiumEnv("FrozenLake-v1", **LAKE, parse_action=read, format_observation=lambda seen: f"cell {seen}")
    start, refused, moved = play(env, "to the west", "to the east")
    assert (start, refused[0], moved[0]) == ("cell 0", "error: go east", "cell 1")


def test_a_text_world_gets_its_text_as_it_is() -> None:
    world = Echo()
    start, said, refused, cut = play(GymnasiumEnv(lambda: world), "hello there", "x" * 21, "cut", seed=2)
    assert start.startswith("Say something.")
    assert said[0] == "You said hello there."
    assert refused[0].startswith("error: ")
    assert cut[2:] == (True, {**cut[3], "truncated": True})
    assert world.closed == 1


def test_the_worlds_notes_stay_apart_from_ours() -> None:
    _, (_, _, done, info) = play(GymnasiumEnv(Echo), "stop")
    assert done
    assert info["success"] is True
    assert {"cost", "calls"} & info.keys() == set()
    assert info["gymnasium"]["array"] == [0, 1, 2]


def test_a_world_that_hangs_is_left_behind_and_closes_itself_later() -> None:
    free, world = threading.Event(), Echo()
    world.step = lambda action: (free.wait(10), "", 0.0, False, False)  # type: ignore[assignment,method-assign,return-value]

    async def episode() -> None:
        env = GymnasiumEnv(lambda: world, timeout_s=0.1)
        await env.reset()
        with pytest.raises(TimeoutError, match=r"the environment: step took longer than 0\.1 s"):
            await env.step("a")
        with pytest.raises(RuntimeError, match="cannot go on"):
            await env.step("b")
        await env.close()
        assert world.closed == 0
        free.set()
        await asyncio.to_thread(world.gone.wait, 10)

    run(episode())
    assert world.closed == 1


def test_other_rollouts_go_on_while_a_world_blocks() -> None:
    world = Echo()

    def slow_step(action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(0.5)
        return "", 0.0, True, False, {}

    async def both() -> int:
        env = GymnasiumEnv(lambda: world)
        await env.reset()
        turn = asyncio.create_task(env.step("a"))
        ticks = 0
        while not turn.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await env.close()
        return ticks

    world.step = slow_step  # type: ignore[method-assign]
    assert run(both()) > 5


def test_a_world_that_raises_is_a_fault_of_the_world() -> None:
    world = Echo()
    world.step = lambda action: 1 // 0  # type: ignore[assignment,method-assign,return-value]
    task = Task(task_id="t", prompt=[Message(role="user", content="Go.")])
    worker = RLRolloutWorker(task, ScriptedPolicy(["go"]), env=GymnasiumEnv(lambda: world))
    run(worker.run_episode())
    assert worker.stop_reason is StopReason.ENV_FAULT
    assert "ZeroDivisionError" in (worker.fault or "")
    assert world.closed == 1


def test_an_episode_with_a_policy() -> None:
    task = Task(task_id="t", prompt=[Message(role="user", content="Reach the goal.")])
    worker = RLRolloutWorker(task, ScriptedPolicy(TO_THE_GOAL), env=GymnasiumEnv("FrozenLake-v1", **LAKE))
    steps, messages, _ = run(worker.run_episode())
    assert worker.stop_reason is StopReason.ENV_DONE
    assert [step.base_reward for step in steps] == [0.0] * 5 + [1.0]
    assert all(step.step_info["state_key"] for step in steps)
    assert [m.role for m in messages[:3]] == ["user", "user", "assistant"]
    assert "".join(step.model_dump_json() for step in steps)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"actions": ["left"]}, "needs 4 different names"),
        ({"actions": ["a", "b", "c", "A"]}, "needs 4 different names"),
        ({"draw": True}, "render_mode"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        play(GymnasiumEnv("FrozenLake-v1", **options))


def test_names_for_text_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match="only the actions of a Discrete space"):
        play(GymnasiumEnv(Echo, actions=["a"]))


def test_an_unknown_world_is_one_line() -> None:
    with pytest.raises(ConfigError, match="gymnasium has no environment 'FrozenLke-v1'") as raised:
        check_registered("FrozenLke-v1")
    assert "\n" not in str(raised.value)
    assert "\x1b" not in str(raised.value)


def test_close_before_reset_and_twice() -> None:
    async def live() -> None:
        env = GymnasiumEnv("FrozenLake-v1")
        await env.close()
        await env.close()

    run(live())
