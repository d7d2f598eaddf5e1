"""One episode: asks the policy, steps the environment, and ends exactly once, whatever happens.

PENDING ─► RUNNING ⇄ TOOL_CALLING | INTERACTING ─► COMPLETED | FAILED
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.concurrency.limits import Limits, Slot
from toolwise.concurrency.tasks import raise_if_cancelled, spawn, wait_all
from toolwise.envs.base import BaseEnv
from toolwise.envs.tool_env import validate_reward
from toolwise.errors import ContextFullError
from toolwise.messages import Message, Prefix
from toolwise.protocols import AgentPolicy, has_sessions
from toolwise.rollout.call_counts import CallCounts
from toolwise.rollout.decision import PolicyDecision
from toolwise.rollout.observation import observation_messages
from toolwise.rollout.termination import Termination
from toolwise.types import CountUsage, Rollout, RouteDecision, StepData, StopReason, Task, Usage
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
"""An episode that never waits yields to the others after this long."""
CLOSE_TIMEOUT_S = 30.0
"""Time limit for the final rewards, and again for releasing the tools, after an episode has ended."""


class RequestState(StrEnum):
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
    whole episode, waiting included; then the tools report their rewards and are released, each within
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
        count_usage: CountUsage | None = None,
        decision: RouteDecision | None = None,
    ) -> None:
        """`decision` is what the rollout records of its route."""
        self.decision = decision
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
        """What the policy saw before a step that is not recorded yet."""
        self._state_key: str | None = None
        self._counts = CallCounts.of(decision, count_usage)
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._finish_task: asyncio.Task[None] | None = None
        self._slot = Slot()

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.rollout_offset}"

    @property
    def done(self) -> bool:
        """Whether the episode has ended or is ending."""
        return self.stop_reason is not None or self._finish_task is not None

    async def run(self) -> None:
        """Play the episode from start to finish."""
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
        """Collect final rewards and release the environment: once, and completely even if the caller is cancelled."""
        if self._finish_task is None:
            self._finish_task = spawn(self._finish())
        await wait_all([self._finish_task])
        self._finish_task.result()

    def stop(self, reason: StopReason, fault: str | None = None) -> None:
        self.stop_reason, self.fault = reason, fault or self.fault

    # The episode itself. Everything runs in one task, so that a turn is cheap; the deadline is enforced from outside.
    # Work that ignored its cancellation may return long after the episode has ended: it finds `_finish_task` set.

    async def _drive(self) -> None:
        await self._start()
        yield_at = self._now() + _YIELD_INTERVAL_S
        while not self.done:
            await self._decide()
            await self._act()
            if self._now() > yield_at:  # let other episodes and timers run even if this one never waits
                await asyncio.sleep(0)
                yield_at = self._now() + _YIELD_INTERVAL_S

    async def _start(self) -> None:
        self._now()
        try:
            self.env.set_seed(self.env_seed)
            await self._slot.acquire(self.limits.env)
            try:
                observation = await self.env.reset()
            finally:
                self._slot.release()
            if self._finish_task is None:
                self.messages.extend(observation_messages(observation))
        except BaseException as fault:
            self._record_fault(fault, StopReason.ENV_FAULT, "reset: ")
        raise_if_cancelled()
        if not self.done:
            self._set_state(RequestState.RUNNING)

    async def _decide(self) -> None:
        """Get the next action from the policy."""
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
            if self.limits.model.limit is not None:  # checked here to save a coroutine per turn
                await self._slot.acquire(self.limits.model)
            started = self._now()
            try:
                answer = await self._session.get_action(Prefix(self.messages), specs)
            finally:
                self._slot.release()
                if self._finish_task is None:  # else the rollout has been handed over
                    self._counts.reply_s += self._now() - started
            if self._finish_task is None:
                self._decision = PolicyDecision.from_answer(answer)
        except BaseException as fault:
            self._record_fault(fault, StopReason.POLICY_FAULT)
        raise_if_cancelled()

    async def _act(self) -> None:
        """Carry out the decision and record the step, whatever the outcome."""
        decision = self._decision
        if decision is None or self.done:
            return
        self._pending_observation = Prefix(self.messages)
        ending = self.termination.stop_before_step(decision)
        cut = ending is StopReason.MAX_TOKENS
        self.messages.append(decision.message_as_text() if cut else decision.message)
        if ending is not None:
            self.stop(ending)
            self._count_calls(self.env.unread_calls(decision.action))
            self._record_step(None, {})
            return
        try:
            await self._step_env(decision)
        except BaseException as fault:
            self._record_fault(fault, StopReason.ENV_FAULT, "step: ")
        raise_if_cancelled()
        self._record_step(None, {})  # the environment failed: record the decision all the same

    async def _step_env(self, decision: PolicyDecision) -> None:
        action, env = decision.action, self.env
        interacting = env.phase_of(action) == "interaction"
        self._set_state(RequestState.INTERACTING if interacting else RequestState.TOOL_CALLING)
        env_action = action if env.structured_actions else action.get("content") or ""
        if self.limits.env.limit is not None:
            await self._slot.acquire(self.limits.env)
        try:
            observation, reward, env_done, info = await env.step(env_action)
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
        if not has_sessions(self.policy):
            return self.policy
        # prompt_ids belong to the task's original prompt, not to a routed one or to what `reset` added.
        unchanged = self.task.prompt_ids is not None and self.messages == list(self.task.prompt)
        prompt_ids = self.task.prompt_ids if unchanged else None
        return self.policy.session(seed=self.seed, do_sample=self.do_sample, prompt_ids=prompt_ids)

    # Faults.

    async def _run_until_deadline(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the episode until the deadline."""
        late = TimeoutError(f"the episode took longer than {self.deadline_s:g} s")
        remaining_s = self.deadline_s - (self._now() - (self._started_at or 0.0))
        try:
            await run_with_deadline(remaining_s, work, late)
        except Exception as fault:
            if fault is not late:  # errors in user code are recorded where they happen: this one is ours
                log.error("%s\n%s", self.rollout_id, format_with_traceback(fault))
            self.stop(*((StopReason.DEADLINE, str(late)) if fault is late else (StopReason.ENV_FAULT, describe(fault))))
        finally:
            self._slot.release()  # on behalf of abandoned work, which must not block the others forever

    def _record_fault(self, fault: BaseException, default_reason: StopReason, where: str = "") -> None:
        """An error in user code becomes a stop reason; it never crashes the run."""
        if isinstance(fault, asyncio.CancelledError):
            raise_if_cancelled()
        if is_closing(fault):
            raise fault
        reason, message = default_reason, f"{where}{describe(as_exception(fault))}"
        if isinstance(fault, ContextFullError):
            reason, message = StopReason.MAX_TOKENS if self.steps else StopReason.PROMPT_TOO_LONG, str(fault)
        if self._finish_task is None:
            self.stop(reason, message)

    # Ending.

    async def _finish(self) -> None:
        if self._pending_observation is not None:  # the step was cut off before it was recorded
            self._record_step(None, {})
        if (problem := self._counts.recount(self.steps)) is not None:
            self.stop(StopReason.ENV_FAULT, problem)
        try:
            raw = await self._with_close_timeout(call_user_code(self.env.final_rewards))
            self.tool_rewards = {name: reward for name in raw if (reward := validate_reward(raw[name])) is not None}
        except Exception as fault:  # a broken tool gives no reward: report it and leave the episode out of the update
            if self.stop_reason is None or self.stop_reason.trainable:
                self.stop(StopReason.ENV_FAULT, f"calc_reward: {describe(fault)}")
        try:
            await self._with_close_timeout(call_user_code(self.env.close))
        except Exception as fault:  # the episode itself is complete; still report what could not be released
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
        """The finished episode as a `Rollout`."""
        decision = self.decision
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
            router_log_prob=None if decision is None else decision.log_prob,
            router_logits=None if decision is None else decision.logits,
            answered_by="" if decision is None else decision.answered_by,
        )

    @property
    def usage(self) -> Usage:
        start = self._started_at if self._started_at is not None else self._now()
        return self._counts.usage(self.steps, (self._ended_at if self._ended_at is not None else self._now()) - start)

    # Bookkeeping.

    def _now(self) -> float:
        """The event loop's clock, which a simulation may control. The first call starts the episode's time."""
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
        except Exception as fault:  # a failing callback must not end the episode
            log.warning("%s: on_state: %s", self.rollout_id, describe(fault))

    def _record_step(self, reward: float | None, info: dict[str, Any]) -> None:
        """Append the step: once, and not after the end."""
        decision, observation = self._decision, self._pending_observation
        if decision is None or observation is None:
            return
        self._decision = self._pending_observation = None
        if self._state_key is not None:
            info = {**info, "state_key": self._state_key}
        self.steps.append(
            StepData.unchecked(
                system_step_index=len(self.steps),
                observation_data=observation,
                action_taken=decision.action,
                raw_policy_output=decision.raw,
                resulting_messages_history=Prefix(self.messages),
                policy_logprobs=decision.tokens,
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
