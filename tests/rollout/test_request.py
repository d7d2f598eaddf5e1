"""One request: identity, states, deadline in virtual time, and late results of abandoned work."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from toolwise.concurrency.deadlines import GRACE_S
from toolwise.concurrency.limits import Gate, Limits
from toolwise.envs.base import BaseEnv, Phase
from toolwise.messages import Message
from toolwise.rollout.request import AsyncRolloutRequest, RequestState
from toolwise.rollout.termination import Termination
from toolwise.testing.virtual_time import simulate
from toolwise.types import StopReason, Task

TASK = Task(task_id="t", prompt=[Message(role="user", content="?")])


class Speaker:
    """A policy that says "on" forever, after a delay; if deaf, it swallows its first cancellation and then takes
    longer."""

    def __init__(self, nap_s: float = 1.0, *, deaf_for_s: float | None = None, logprobs: Any = None) -> None:
        self.nap_s, self.deaf_for_s, self.logprobs = nap_s, deaf_for_s, logprobs
        self.asked: list[float] = []
        self.open = asyncio.Event()

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> Any:
        self.asked.append(asyncio.get_running_loop().time())
        try:
            await asyncio.sleep(self.nap_s)
        except asyncio.CancelledError:
            if self.deaf_for_s is None:
                raise
            await asyncio.sleep(self.deaf_for_s)
        return {"type": "text", "content": "on"}, "on", self.logprobs, None


class Rooms(BaseEnv):
    """An endless environment; every other step is an interaction."""

    def __init__(self, step_s: float = 1.0, rewards: Any = None) -> None:
        self.step_s, self.rewards = step_s, rewards
        self.seeds: list[int] = []
        self.log: list[str] = []

    def set_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def phase_of(self, action: Any) -> Phase:
        return "interaction" if self.log.count("step") % 2 else "tool"

    async def reset(self) -> str:
        self.log.append("reset")
        return ""

    async def step(self, action: Any) -> Any:
        self.log.append("step")
        await asyncio.sleep(self.step_s)
        return "a room", 0.5, False, {}

    async def final_rewards(self) -> Any:
        self.log.append("final_rewards")
        return self.rewards if self.rewards is not None else {}

    async def close(self) -> None:
        self.log.append("close")


def made(policy: Any = None, env: BaseEnv | None = None, **more: Any) -> AsyncRolloutRequest:
    return AsyncRolloutRequest(
        TASK, policy if policy is not None else Speaker(), env if env is not None else Rooms(), **more
    )


def run(request: AsyncRolloutRequest) -> float:
    """When it ends, in virtual seconds."""

    async def whole() -> float:
        await request.run()
        return asyncio.get_running_loop().time()

    return simulate(whole())


def test_a_rollout_is_known_by_its_group_and_offset() -> None:
    request = made(group_id="g", batch_data_id=4, rollout_offset=2, route="SEARCH")
    run(request)
    rollout = request.to_rollout()
    assert (rollout.rollout_id, rollout.group_id) == ("g/2", "g")
    assert (rollout.batch_data_id, rollout.rollout_offset, rollout.route) == (4, 2, "SEARCH")
    assert made().rollout_id == "t/0"


@pytest.mark.parametrize(("given", "expected"), [({"seed": 7}, 7), ({"seed": 7, "env_seed": 3}, 3)])
def test_the_world_has_its_own_seed_where_one_is_given(given: dict[str, int], expected: int) -> None:
    world = Rooms()
    run(made(env=world, termination=Termination(max_steps=1), **given))
    assert world.seeds == [expected]


def test_states_are_told_as_they_come() -> None:
    states: list[RequestState] = []
    request = made(termination=Termination(max_steps=2), on_state=lambda r: states.append(r.state))
    assert request.state is RequestState.PENDING
    run(request)
    assert states == ["running", "tool_calling", "running", "interacting", "completed"]
    assert request.state is RequestState.COMPLETED


def test_a_request_that_nobody_runs_is_none() -> None:
    request = made()
    assert not request.done
    assert request.steps == []


def test_the_deadline_covers_everything_to_the_second() -> None:
    request = made(deadline_s=10.5)
    assert run(request) == 10.5
    assert request.stop_reason is StopReason.DEADLINE
    assert len(request.steps) == 5
    assert (request.usage.seconds, request.usage.reply_s) == (10.5, 5.5)
    assert request.state is RequestState.COMPLETED


def test_waiting_at_a_gate_counts() -> None:
    async def wait() -> AsyncRolloutRequest:
        gate = Gate(1)
        await gate.enter()
        request = made(deadline_s=5.0, limits=Limits(model=gate))
        await request.run()
        return request

    request = simulate(wait())
    assert request.stop_reason is StopReason.DEADLINE
    assert request.steps == []


@pytest.mark.parametrize("deaf_for_s", [0.5, 5.0])
def test_a_policy_that_swallows_the_deadline_is_not_asked_again(deaf_for_s: float) -> None:
    async def whole() -> None:
        policy = Speaker(100.0, deaf_for_s=deaf_for_s)
        request = made(policy, deadline_s=3.0)
        await request.run()
        ended = asyncio.get_running_loop().time()
        assert ended == 3.0 + min(deaf_for_s, GRACE_S)
        await asyncio.sleep(100)
        assert policy.asked == [0.0]
        assert request.stop_reason is StopReason.DEADLINE
        assert request.steps == []
        assert len(request.messages) == 1

    simulate(whole())


def test_a_policy_that_swallows_a_cancellation_from_outside_is_not_asked_again() -> None:
    async def whole() -> None:
        policy = Speaker(100.0, deaf_for_s=5.0)
        request = made(policy)
        running = asyncio.create_task(request.run())
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        await asyncio.sleep(100)
        assert policy.asked == [0.0]
        assert request.state is RequestState.FAILED
        assert len(request.messages) == 1

    simulate(whole())


def test_what_is_left_behind_keeps_nobody_else_out() -> None:
    async def whole() -> list[StopReason | None]:
        limits = Limits(model=Gate(1))
        deaf = made(Speaker(100.0, deaf_for_s=1000.0), deadline_s=3.0, limits=limits)
        other = made(Speaker(0.1), deadline_s=60.0, limits=limits, termination=Termination(max_steps=2))
        await asyncio.gather(deaf.run(), other.run())
        return [deaf.stop_reason, other.stop_reason]

    assert simulate(whole()) == [StopReason.DEADLINE, StopReason.MAX_STEPS]


def test_in_parts_it_is_the_same_episode() -> None:
    async def in_parts() -> AsyncRolloutRequest:
        request = made(termination=Termination(max_steps=2))
        await request.start()
        while not request.done:
            await request.decide()
            await request.act()
        await request.finish()
        return request

    whole = made(termination=Termination(max_steps=2))
    run(whole)
    parts = simulate(in_parts())
    assert [m.content for m in parts.messages] == [m.content for m in whole.messages]
    assert parts.to_rollout().usage == whole.to_rollout().usage


def test_in_parts_the_time_between_them_counts() -> None:
    async def dawdle() -> AsyncRolloutRequest:
        request = made(deadline_s=10.0)
        await request.start()
        await asyncio.sleep(20)
        await request.decide()
        await request.finish()
        return request

    assert simulate(dawdle()).stop_reason is StopReason.DEADLINE


def test_closing_has_its_own_time() -> None:
    class Sticky(Rooms):
        async def final_rewards(self) -> Any:
            await asyncio.sleep(1000)

        async def close(self) -> None:
            await asyncio.sleep(1000)

    request = made(env=Sticky(), deadline_s=100.0, close_timeout_s=2.0, termination=Termination(max_steps=1))
    assert run(request) == 2.0 + 2.0 + 2.0  # one turn, the rewards, closing
    assert request.stop_reason is StopReason.ENV_FAULT
    assert request.fault == "calc_reward: TimeoutError: took longer than 2 s"


@pytest.mark.parametrize("rewards", [7, {"quest": "much"}, {"quest": math.nan}, ["quest"]])
def test_last_rewards_that_make_no_sense_are_a_fault_of_the_world(rewards: Any) -> None:
    request = made(env=Rooms(rewards=rewards), termination=Termination(max_steps=1))
    run(request)
    assert request.stop_reason is StopReason.ENV_FAULT
    assert (request.fault or "").startswith("calc_reward: ")
    assert request.to_rollout().tool_rewards == {}


def test_last_rewards_are_numbers_and_none_is_left_out() -> None:
    request = made(env=Rooms(rewards={"a": 1, "b": None, "c": True}), termination=Termination(max_steps=1))
    run(request)
    assert request.tool_rewards == {"a": 1.0, "c": 1.0}


@pytest.mark.parametrize("logprobs", [[-1.0], {"token_ids": 3}], ids=["a list", "no ids"])
def test_log_probs_that_make_no_sense_are_a_fault_of_the_policy(logprobs: Any) -> None:
    request = made(Speaker(logprobs=logprobs))
    run(request)
    assert request.stop_reason is StopReason.POLICY_FAULT
    assert request.to_rollout().usage.sampled_tokens == 0


def test_an_infrastructure_fault_on_the_way_leaves_the_episode_whole_and_out_of_the_update() -> None:
    class Shaky(Rooms):
        async def step(self, action: Any) -> Any:
            return "", None, False, {"infrastructure_fault": "server down", "calls": {"a": 1}, "cost": 2.0}

    request = made(env=Shaky(), termination=Termination(max_steps=2))
    run(request)
    rollout = request.to_rollout()
    assert rollout.stop_reason is StopReason.MAX_STEPS
    assert rollout.infrastructure_fault
    assert not rollout.trainable
    assert rollout.fault == "server down"
    assert (rollout.usage.calls, rollout.usage.cost) == ({"a": 2}, 4.0)


def test_cancelled_and_cancelled_again_while_its_work_is_slow_to_go() -> None:
    async def whole() -> None:
        world = Rooms()
        request = made(Speaker(100.0, deaf_for_s=0.5), world)
        running = asyncio.create_task(request.run())
        await asyncio.sleep(1)
        for _ in range(5):
            running.cancel()
            await asyncio.sleep(0.01)
        await asyncio.wait({running})
        assert running.cancelled()
        assert asyncio.get_running_loop().time() == 1.5
        assert world.log == ["reset", "final_rewards", "close"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    simulate(whole())
