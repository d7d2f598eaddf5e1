"""Planted bugs, one of each class: what the invariants are there to find."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from toolwise.concurrency.deadlines import gather_all
from toolwise.concurrency.limits import UNLIMITED, Gate
from toolwise.envs import tool_env
from toolwise.envs.tool_env import ToolEnv
from toolwise.rollout import request, scheduler
from toolwise.rollout.decision import PolicyDecision
from toolwise.rollout.observation import observation_messages
from toolwise.rollout.queue import RolloutQueue
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.rollout.tokens import TokenBuffer
from toolwise.types import StopReason

Plant = Callable[[pytest.MonkeyPatch], None]


def release_skipped_on_cancellation(patch: pytest.MonkeyPatch) -> None:
    async def run(self: Any) -> None:
        await self._run_until_deadline(self._drive())
        await self.finish()

    patch.setattr(AsyncRolloutRequest, "run", run)


def finish_not_shielded(patch: pytest.MonkeyPatch) -> None:
    async def finish(self: Any) -> None:
        if self._finish_task is None:
            self._finish_task = asyncio.current_task()
            await self._finish()

    patch.setattr(AsyncRolloutRequest, "finish", finish)


def released_twice(patch: pytest.MonkeyPatch) -> None:
    close = ToolEnv.close

    async def twice(self: Any) -> None:
        instances = self._instances
        try:
            await close(self)
        except OSError:  # "it did not work: try again"
            self._instances = instances
            await close(self)

    patch.setattr(ToolEnv, "close", twice)


def reward_asked_for_after_release(patch: pytest.MonkeyPatch) -> None:
    close = ToolEnv.close

    async def backwards(self: Any) -> None:
        instances = dict(self._instances)
        await close(self)
        self._instances = instances
        self.rewards = await ToolEnv.final_rewards(self)

    patch.setattr(ToolEnv, "close", backwards)


def late_tool_never_released(patch: pytest.MonkeyPatch) -> None:
    async def create(self: Any, name: str) -> None:
        self._instances[name] = await self._episode_tools[name].create(self._episode)

    patch.setattr(ToolEnv, "_create", create)


def tools_noted_only_when_all_are_made(patch: pytest.MonkeyPatch) -> None:
    async def reset(self: Any) -> str:
        made = {}
        for name, tool in self._episode_tools.items():
            made[name] = await self._with_timeout(tool.create(self._episode))
        self._instances = made
        return ""

    patch.setattr(ToolEnv, "reset", reset)


def making_a_tool_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    async def wait(self: Any, work: Any) -> Any:
        return await work

    patch.setattr(ToolEnv, "_with_timeout", wait)


def deadline_ends_the_wait_and_not_the_work(patch: pytest.MonkeyPatch) -> None:
    async def run_with_deadline(limit_s: float, work: Any, late: Exception) -> Any:
        task = asyncio.ensure_future(work)
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            raise late
        return task.result()

    patch.setattr(request, "run_with_deadline", run_with_deadline)
    patch.setattr(tool_env, "run_with_deadline", run_with_deadline)


def no_deadline_at_all(patch: pytest.MonkeyPatch) -> None:
    async def run_with_deadline(limit_s: float, work: Any, late: Exception) -> Any:
        return await work

    patch.setattr(request, "run_with_deadline", run_with_deadline)
    patch.setattr(tool_env, "run_with_deadline", run_with_deadline)


def deadline_begins_anew_each_turn(patch: pytest.MonkeyPatch) -> None:
    in_time = AsyncRolloutRequest._run_until_deadline

    async def again(self: Any, work: Any) -> None:
        self._started_at = None
        await in_time(self, work)

    patch.setattr(AsyncRolloutRequest, "_run_until_deadline", again)


def goes_on_after_a_swallowed_cancellation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "raise_if_cancelled", lambda: None)
    patch.setattr(AsyncRolloutRequest, "done", property(lambda self: self.stop_reason is not None))


def zombie_writes_after_the_end(patch: pytest.MonkeyPatch) -> None:
    async def move(self: Any, decision: PolicyDecision) -> None:
        self._set_state(request.RequestState.TOOL_CALLING)
        structured = self.env.structured_actions
        move = decision.action if structured else decision.action.get("content") or ""
        await self._slot.acquire(self.limits.env)
        try:
            observation, reward, env_done, info = await self.env.step(move)
        finally:
            self._slot.release()
        self.messages.extend(observation_messages(observation))
        self._count_calls(info)
        ending = self.termination.stop_after_step(decision, env_done, info, structured=structured)
        ending = ending or self.termination.count_step()
        if ending is not None:
            self.stop(ending)
        else:
            self._set_state(request.RequestState.RUNNING)
        self._record_step(reward, info)

    patch.setattr(AsyncRolloutRequest, "_step_env", move)


def ends_twice(patch: pytest.MonkeyPatch) -> None:
    finish = AsyncRolloutRequest._finish

    async def again(self: Any) -> None:
        await finish(self)
        if self.fault is not None:
            self._set_state(request.RequestState.FAILED)

    patch.setattr(AsyncRolloutRequest, "_finish", again)


def calls_counted_twice(patch: pytest.MonkeyPatch) -> None:
    count = AsyncRolloutRequest._count_calls

    def twice(self: Any, info: dict[str, Any]) -> None:
        count(self, info)
        if info.get("failed_calls"):
            count(self, info)

    patch.setattr(AsyncRolloutRequest, "_count_calls", twice)


def history_is_trimmed(patch: pytest.MonkeyPatch) -> None:
    count = AsyncRolloutRequest._count_calls

    def forget(self: Any, info: Any) -> None:
        count(self, info)
        if len(self.messages) > 4:
            del self.messages[1]

    patch.setattr(AsyncRolloutRequest, "_count_calls", forget)


def rewards_under_other_names(patch: pytest.MonkeyPatch) -> None:
    rewards = ToolEnv.final_rewards

    async def mixed(self: Any) -> dict[str, float]:
        given = await rewards(self)
        return dict(zip(reversed(given), given.values(), strict=True))

    patch.setattr(ToolEnv, "final_rewards", mixed)


def gate_kept_after_a_fault(patch: pytest.MonkeyPatch) -> None:
    leave = Gate.leave

    def only_if_well(self: Gate) -> None:
        if sys.exc_info()[0] is None:
            leave(self)

    patch.setattr(Gate, "leave", only_if_well)


def gate_kept_by_what_was_left_behind(patch: pytest.MonkeyPatch) -> None:
    async def in_time(self: Any, work: Any) -> None:
        late = TimeoutError("late")
        left = self.deadline_s - (self._now() - self._started_at)
        try:
            await request.run_with_deadline(left, work, late)
        except Exception as fault:
            self.stop(StopReason.DEADLINE if fault is late else StopReason.ENV_FAULT, str(fault))

    patch.setattr(AsyncRolloutRequest, "_run_until_deadline", in_time)


def gate_lets_everybody_in(patch: pytest.MonkeyPatch) -> None:
    async def enter(self: Gate) -> None:
        return

    patch.setattr(Gate, "enter", enter)
    patch.setattr(Gate, "leave", lambda self: None)


def concurrency_unbounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "Gate", lambda limit: UNLIMITED)


def group_handed_over_incomplete(patch: pytest.MonkeyPatch) -> None:
    groups = RolloutScheduler.groups

    async def early(self: Any, *args: Any, **more: Any) -> Any:
        async for group in groups(self, *args, **more):
            yield group[:-1] if len(group) == 3 else group

    patch.setattr(RolloutScheduler, "groups", early)


def results_in_finishing_order(patch: pytest.MonkeyPatch) -> None:
    async def roll_out(self: Any, decisions: Any, **more: Any) -> Any:
        return [rollout async for group in self.groups(decisions, **more) for rollout in group]

    patch.setattr(RolloutScheduler, "roll_out", roll_out)


def handed_over_twice(patch: pytest.MonkeyPatch) -> None:
    groups = RolloutScheduler.groups

    async def twice(self: Any, decisions: Any, *, on_done: Any, **more: Any) -> Any:
        async for group in groups(self, decisions, on_done=on_done, **more):
            for rollout in group:
                if rollout.stop_reason is StopReason.DEADLINE:
                    on_done(rollout)
            yield group

    patch.setattr(RolloutScheduler, "groups", twice)


def leaves_without_waiting(patch: pytest.MonkeyPatch) -> None:
    async def ended(tasks: Any) -> None:
        return

    patch.setattr(scheduler, "wait_all", ended)


def second_cancellation_reaches_the_end_in_step(patch: pytest.MonkeyPatch) -> None:
    async def in_step(self: Any, requests: Any, groups: int) -> Any:
        for first in range(0, len(requests), self.max_concurrent):
            part = requests[first : first + self.max_concurrent]
            try:
                await gather_all(r.start() for r in part)
                while active := [r for r in part if not r.done]:
                    await gather_all(r.decide() for r in active)
                    await gather_all(r.act() for r in active)
            finally:
                await gather_all(r.finish() for r in part)
        rollouts: list[Any] = [[] for _ in range(groups)]
        for r in requests:
            rollouts[r.batch_data_id].append(r.to_rollout())
        return rollouts

    patch.setattr(RolloutScheduler, "_run_lock_step", in_step)


def tokens_read_again_from_text(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenBuffer, "_next", lambda self, last, messages, tools: self._start_row(messages, tools, "clean"))


def log_probs_cut_short(patch: pytest.MonkeyPatch) -> None:
    from_answer = PolicyDecision.from_answer.__func__  # type: ignore[attr-defined]

    def cut(cls: Any, answer: Any) -> Any:
        decision = from_answer(cls, answer)
        if decision.tokens is not None and decision.action["type"] == "tool_call":
            object.__setattr__(decision.tokens, "logprobs", decision.tokens.logprobs[:-1])
        return decision

    patch.setattr(PolicyDecision, "from_answer", classmethod(cut))


ROLLOUT_MUTATIONS: dict[Plant, str] = {
    release_skipped_on_cancellation: r"never told of its end|closed 0 times|released 0 times",
    finish_not_shielded: r"left running|released 0 times",
    released_twice: r"release after release",
    reward_asked_for_after_release: r"calc_reward after release",
    late_tool_never_released: r"released 0 times",
    tools_noted_only_when_all_are_made: r"released 0 times",
    making_a_tool_has_no_deadline: r"(create|release|calc_reward) ran for",
    deadline_ends_the_wait_and_not_the_work: r"still at work after the end",
    no_deadline_at_all: r"Deadlock",
    deadline_begins_anew_each_turn: r"the deadline is",
    goes_on_after_a_swallowed_cancellation: r"began .* past",
    zombie_writes_after_the_end: r"changed after it was handed over",
    ends_twice: r"-> failed",
    calls_counted_twice: r"answered, .* counted",
    history_is_trimmed: r"what the policy saw before was changed",
    rewards_under_other_names: r"and the tools gave",
    gate_kept_after_a_fault: r"places are free",
    gate_kept_by_what_was_left_behind: r"places are free",
    gate_lets_everybody_in: r"model: .* inside",
    concurrency_unbounded: r"max_concurrent: .* inside",
    group_handed_over_incomplete: r"a group of",
    results_in_finishing_order: r"roll_out gave",
    handed_over_twice: r"more than once",
    leaves_without_waiting: r"still at work after the end",
    second_cancellation_reaches_the_end_in_step: r"left running|closed 0 times|never told|never awaited",
    tokens_read_again_from_text: r"does not extend",
    log_probs_cut_short: r"log-probs",
}
"""planted bug -> the words of the invariant that it breaks"""


class IgnoresCapacity(RolloutQueue[Any]):
    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.capacity = 10_000


class IgnoresStaleness(RolloutQueue[Any]):
    @property
    def _can_admit(self) -> bool:
        return self.in_progress + self.waiting < self.capacity


class FastGroupsPassSlowOnes(RolloutQueue[Any]):
    def _ready_by_finish_order(self, count: int) -> list[int]:
        return list(self._complete)[:count]


class WakesOnlyTheFirst(RolloutQueue[Any]):
    def _wake_waiters(self) -> None:
        for listener in self._waiters[:1]:
            if not listener.done():
                listener.set_result(None)


class ForgetsToTellOfAFault(RolloutQueue[Any]):
    def fail(self, fault: BaseException) -> None:
        self._fault = fault


class LastInFirstOut(RolloutQueue[Any]):
    def _ready_numbers(self, count: int) -> list[int]:
        return sorted(self._complete, reverse=True)[:count]


class GivesAGroupTwice(RolloutQueue[Any]):
    async def take(self, count: int) -> Any:
        taken = await super().take(count)
        if taken[0].ticket.number == 2:
            self._complete[2] = (taken[0].ticket, taken[0].group)
        return taken


class LosesAGroup(RolloutQueue[Any]):
    def put(self, ticket: Any, group: Any) -> None:
        super().put(ticket, group)
        if len(self._complete) > self.per_update:
            self._complete.pop(ticket.number)


class ForgetsWhatWasGivenBack(RolloutQueue[Any]):
    def return_unused(self, count: int) -> None:
        self._remaining += count


QUEUE_MUTATIONS: dict[type[RolloutQueue[Any]], str] = {
    IgnoresCapacity: r"room for",
    IgnoresStaleness: r"updates old",
    FastGroupsPassSlowOnes: r"updates old",
    WakesOnlyTheFirst: r"Deadlock",
    ForgetsToTellOfAFault: r"Deadlock",
    LastInFirstOut: r"was taken before",
    GivesAGroupTwice: r"was not there",
    LosesAGroup: r"wait in the queue|Deadlock",
    ForgetsWhatWasGivenBack: r"Deadlock",
}
