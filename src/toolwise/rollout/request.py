"""One episode: asks the policy, steps the environment, and ends exactly once, whatever happens.

PENDING ─► RUNNING ⇄ TOOL_CALLING | INTERACTING ─► COMPLETED | FAILED
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.concurrency.limits import Limits, Slot
from toolwise.concurrency.tasks import spawn
from toolwise.envs.base import BaseEnv
from toolwise.envs.tool_env import validate_reward
from toolwise.errors import ContextFullError
from toolwise.messages import Message, Prefix
from toolwise.protocols import AgentPolicy, SessionPolicy
from toolwise.rollout.call_counts import CallCounts
from toolwise.rollout.decision import PolicyDecision
from toolwise.rollout.observation import observation_messages
from toolwise.rollout.termination import Termination
from toolwise.types import Rollout, StepData, StopReason, Task, Usage
from toolwise.untrusted.bounds import MAX_FAULT_CHARS, truncate_text
from toolwise.untrusted.user_code import (
    as_exception,
    await_user_code,
    call_user_code,
    describe,
    format_with_traceback,
    is_closing,
)

log = logging.getLogger("toolwise.rollout")
T = TypeVar("T")

_YIELD_INTERVAL_S = 0.002
"""After which an episode lets the others have their turn, whatever it does."""
CLOSE_TIMEOUT_S = 30.0
"""What the last rewards and the release of an episode's tools may take, each, after its end."""


class RequestState(StrEnum):
    """Where an episode stands."""

    PENDING = "pending"
    RUNNING = "running"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    COMPLETED = "completed"
    FAILED = "failed"


class AsyncRolloutRequest:
    """One rollout of one task, identified by (`batch_data_id`, `rollout_offset`).

    `run` plays the whole episode; `start`, `decide`, `act` and `finish` are its parts, for callers that run many in
    lock step. They raise only when cancelled from outside: any fault becomes a `stop_reason`. `deadline_s` covers the
    whole episode, waiting included; afterwards its tools still give their rewards and are released, each within
    `close_timeout_s`.
    """

    def __init__(
        self,
        task: Task,
        policy: AgentPolicy,
        env: BaseEnv,
        *,
        batch_data_id: int = 0,
        rollout_offset: int = 0,
        group_id: str = "",
        route: str | None = None,
        prompt: Sequence[Message] | None = None,
        seed: int = 0,
        env_seed: int | None = None,
        do_sample: bool = True,
        deadline_s: float = 600.0,
        close_timeout_s: float | None = None,
        termination: Termination | None = None,
        limits: Limits | None = None,
        on_state: Callable[[AsyncRolloutRequest], None] | None = None,
    ) -> None:
        self.task, self.policy, self.env = task, policy, env
        self.batch_data_id, self.rollout_offset = batch_data_id, rollout_offset
        self.group_id, self.route = group_id or task.task_id, route
        self.seed, self.do_sample = seed, do_sample
        self.env_seed = seed if env_seed is None else env_seed
        self.deadline_s = deadline_s
        self.close_timeout_s = close_timeout_s if close_timeout_s is not None else min(CLOSE_TIMEOUT_S, deadline_s)
        self.termination = termination if termination is not None else Termination()
        self.limits = limits if limits is not None else Limits()
        self.on_state = on_state
        self.state = RequestState.PENDING
        self.messages: list[Message] = list(prompt if prompt is not None else task.prompt)
        self.steps: list[StepData] = []
        self.stop_reason: StopReason | None = None
        self.fault: str | None = None
        self.infrastructure_fault = False
        self.tool_rewards: dict[str, float] = {}
        self._session: AgentPolicy | None = None
        self._decision: PolicyDecision | None = None
        self._pending_observation: Prefix[Message] | None = None
        """What the policy saw of a step that is not noted yet."""
        self._state_key: str | None = None
        self._counts = CallCounts()
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._finish_task: asyncio.Task[None] | None = None
        self._slot = Slot()

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.rollout_offset}"

    @property
    def done(self) -> bool:
        """Whether it is over, or coming to its end."""
        return self.stop_reason is not None or self._finish_task is not None

    async def run(self) -> None:
        """From beginning to end."""
        try:
            await self._run_until_deadline(self._drive())
        finally:
            await self.finish()

    async def start(self) -> None:
        await self._run_until_deadline(self._start())

    async def decide(self) -> None:
        await self._run_until_deadline(self._decide())

    async def act(self) -> None:
        await self._run_until_deadline(self._act())

    async def finish(self) -> None:
        """Ask for the last rewards and free the world: once, and to the end, however often somebody cancels."""
        if self._finish_task is None:
            self._finish_task = spawn(self._finish())
        cancelled = False
        while not self._finish_task.done():
            try:
                await asyncio.shield(self._finish_task)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def stop(self, reason: StopReason, fault: str | None = None) -> None:
        self.stop_reason, self.fault = reason, fault or self.fault

    # The course of an episode. Everything runs in one task, so that a turn costs little; the deadline is kept from
    # outside. Work that did not heed it may come back long after the episode is over: it finds `_finish_task` set.

    async def _drive(self) -> None:
        await self._start()
        turn_ends = self._now() + _YIELD_INTERVAL_S
        while not self.done:
            await self._decide()
            await self._act()
            if self._now() > turn_ends:  # a policy and a world that never wait must not keep others, and the clock, out
                await asyncio.sleep(0)
                turn_ends = self._now() + _YIELD_INTERVAL_S

    async def _start(self) -> None:
        self._now()
        try:
            await self._reset()
        except BaseException as fault:
            self._record_fault(fault, StopReason.ENV_FAULT, "reset: ")
        _raise_if_cancelled()
        if not self.done:
            self._set_state(RequestState.RUNNING)

    async def _reset(self) -> None:
        self.env.set_seed(self.env_seed)
        await self._slot.acquire(self.limits.env)
        try:
            observation = await self.env.reset()
        finally:
            self._slot.release()
        if self._finish_task is None:
            self.messages.extend(observation_messages(observation))

    async def _decide(self) -> None:
        """Ask the policy."""
        if self.done:
            return
        try:
            specs, self._state_key = self.env.tool_specs(), self.env.state_key
        except BaseException as fault:
            self._record_fault(fault, StopReason.ENV_FAULT, "tool_specs, state_key: ")
            return
        try:
            if self._session is None:
                self._session = self._open_session()
            if self.limits.model.limit is not None:  # asked here and not there: a coroutine a turn is worth the words
                await self._slot.acquire(self.limits.model)
            try:
                answer = await self._session.get_action(Prefix(self.messages), specs)
            finally:
                self._slot.release()
            if self._finish_task is None:
                self._decision = PolicyDecision.from_answer(answer)
        except BaseException as fault:
            self._record_fault(fault, StopReason.POLICY_FAULT)
        _raise_if_cancelled()

    async def _act(self) -> None:
        """Carry out what was decided, and note the step, whatever came of it."""
        decision = self._decision
        if decision is None or self.done:
            return
        self._pending_observation = Prefix(self.messages)
        self.messages.append(decision.message)
        ending = self.termination.stop_before_step(decision)
        if ending is not None:
            self.stop(ending)
            self._count_calls(self.env.unread_calls(decision.action))
            self._record_step(None, {})
            return
        try:
            await self._step_env(decision)
        except BaseException as fault:
            self._record_fault(fault, StopReason.ENV_FAULT, "step: ")
        _raise_if_cancelled()
        self._record_step(None, {})  # where the world failed: what was decided is kept all the same

    async def _step_env(self, decision: PolicyDecision) -> None:
        action, env = decision.action, self.env
        interacting = env.phase_of(action) == "interaction"
        self._set_state(RequestState.INTERACTING if interacting else RequestState.TOOL_CALLING)
        move = action if env.structured_actions else action.get("content") or ""
        if self.limits.env.limit is not None:
            await self._slot.acquire(self.limits.env)
        try:
            observation, reward, env_done, info = await env.step(move)
        finally:
            self._slot.release()
        if self._finish_task is not None:
            return
        reward = validate_reward(reward)
        self.messages.extend(observation_messages(observation))
        self._count_calls(info)
        ending = self.termination.stop_after_step(decision, env_done, info, structured=env.structured_actions)
        ending = ending or self.termination.count_step()
        if ending is not None:
            self.stop(ending, str(info["critical_error"]) if ending is StopReason.CRITICAL_ERROR else None)
        else:
            self._set_state(RequestState.RUNNING)
        self._record_step(reward, info)

    def _open_session(self) -> AgentPolicy:
        if not hasattr(self.policy, "session"):  # what `isinstance(…, SessionPolicy)` asks, at a hundredth of its cost
            return self.policy
        policy = cast("SessionPolicy", self.policy)
        # Ids that came with the task stand for its own prompt: neither for a routed one, nor for what `reset` added.
        own = self.task.prompt_ids is not None and self.messages == list(self.task.prompt)
        prompt_ids = self.task.prompt_ids if own else None
        return policy.session(seed=self.seed, do_sample=self.do_sample, prompt_ids=prompt_ids)

    # What goes wrong.

    async def _run_until_deadline(self, work: Coroutine[Any, Any, None]) -> None:
        """A part of the episode, ended at its deadline."""
        late = TimeoutError(f"the episode took longer than {self.deadline_s:g} s")
        left = self.deadline_s - (self._now() - (self._started_at or 0.0))
        try:
            await run_with_deadline(left, work, late)
        except Exception as fault:
            if fault is not late:  # other people's faults are told where they happen: this one is ours
                log.error("%s\n%s", self.rollout_id, format_with_traceback(fault))
            self.stop(*((StopReason.DEADLINE, str(late)) if fault is late else (StopReason.ENV_FAULT, describe(fault))))
        finally:
            self._slot.release()  # in the name of work that was left behind: it must not keep the others out for ever

    def _record_fault(self, fault: BaseException, default_reason: StopReason, where: str = "") -> None:
        """A fault in other people's code is a typed outcome, never a crash of the run."""
        if isinstance(fault, asyncio.CancelledError):
            _raise_if_cancelled()
        if is_closing(fault):
            raise fault
        reason, said = default_reason, f"{where}{describe(as_exception(fault))}"
        if isinstance(fault, ContextFullError):
            reason, said = StopReason.MAX_TOKENS if self.steps else StopReason.PROMPT_TOO_LONG, str(fault)
        if self._finish_task is None:
            self.stop(reason, said)

    # The end.

    async def _finish(self) -> None:
        if self._pending_observation is not None:  # the deadline, or somebody, ended the step before it was noted
            self._record_step(None, {})
        try:
            given = await self._with_close_timeout(call_user_code(self.env.final_rewards))
            self.tool_rewards = {name: reward for name in given if (reward := validate_reward(given[name])) is not None}
        except Exception as fault:  # no reward to be had from a broken tool: say so and leave it out of the update
            if self.stop_reason is None or self.stop_reason.trainable:
                self.stop(StopReason.ENV_FAULT, f"calc_reward: {describe(fault)}")
        try:
            await self._with_close_timeout(call_user_code(self.env.close))
        except Exception as fault:  # the episode is over and whole; what could not be freed is still said
            self.fault = self.fault or f"close: {describe(fault)}"
            log.warning("task %s: %s", self.task.task_id, self.fault)
        self._ended_at = self._now()
        failed = self.stop_reason in (None, StopReason.POLICY_FAULT, StopReason.ENV_FAULT)
        self._set_state(RequestState.FAILED if failed else RequestState.COMPLETED)
        log.info(
            "%s: %s after %d steps, cost %g", self.rollout_id, self.stop_reason, len(self.steps), self._counts.cost
        )

    async def _with_close_timeout(self, work: Coroutine[Any, Any, T]) -> T:
        if self.env.keeps_deadlines:
            return await await_user_code(work)
        return await run_with_deadline(
            self.close_timeout_s, work, TimeoutError(f"took longer than {self.close_timeout_s:g} s")
        )

    def to_rollout(self) -> Rollout:
        """What the episode came to."""
        return Rollout(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            batch_data_id=self.batch_data_id,
            rollout_offset=self.rollout_offset,
            task=self.task,
            route=self.route,
            steps=tuple(self.steps),
            messages=tuple(self.messages),
            stop_reason=self.stop_reason or StopReason.POLICY_FAULT,
            usage=self.usage,
            tool_rewards=self.tool_rewards,
            fault=self.fault and truncate_text(self.fault, MAX_FAULT_CHARS),
            infrastructure_fault=self.infrastructure_fault,
        )

    @property
    def usage(self) -> Usage:
        began = self._started_at if self._started_at is not None else self._now()
        return self._counts.usage(self.steps, (self._ended_at if self._ended_at is not None else self._now()) - began)

    # Bookkeeping.

    def _now(self) -> float:
        """The event loop's own clock, which a simulation may set."""
        now = asyncio.get_running_loop().time()
        if self._started_at is None:
            self._started_at = now
        return now

    def _set_state(self, state: RequestState) -> None:
        self.state = state
        if self.on_state is None:
            return
        try:
            call_user_code(self.on_state, self)
        except Exception as fault:  # whoever watches an episode must not end it
            log.warning("%s: on_state: %s", self.rollout_id, describe(fault))

    def _record_step(self, reward: float | None, info: dict[str, Any]) -> None:
        """Write the step down: once, and not after the end."""
        decision, seen = self._decision, self._pending_observation
        if decision is None or seen is None:
            return
        self._decision = self._pending_observation = None
        if self._state_key is not None:
            info = {**info, "state_key": self._state_key}
        self.steps.append(
            StepData.unchecked(
                system_step_index=len(self.steps),
                observation_data=seen,
                action_taken=decision.action,
                raw_policy_output=decision.raw,
                resulting_messages_history=Prefix(self.messages),
                policy_logprobs=decision.logprobs,
                policy_value_estimate=decision.value,
                is_done=self.done,
                step_info={**info, "assistant_turn_index": len(self.steps)},
                base_reward=reward,
                advantage=None,
                return_to_go=None,
            )
        )
        if log.isEnabledFor(logging.DEBUG):
            log.debug("step %d of %s: %s", len(self.steps), self.rollout_id, decision.raw)

    def _count_calls(self, info: dict[str, Any]) -> None:
        self._counts.add(info)
        if info.get("infrastructure_fault"):
            self.infrastructure_fault = True
            self.fault = self.fault or str(info["infrastructure_fault"])


def _raise_if_cancelled() -> None:
    """The awaited work may have swallowed a cancellation of this task."""
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError
