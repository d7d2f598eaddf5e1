"""Runs many episodes at once: `n` per prompt, returned in order of (prompt, offset) whatever finished first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from toolwise.concurrency.deadlines import gather_all
from toolwise.concurrency.garbage import relaxed_gc
from toolwise.concurrency.limits import Gate, Limits
from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.envs.base import BaseEnv
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ToolwiseError
from toolwise.protocols import AgentPolicy
from toolwise.rollout.adaptive_gate import AdaptiveGate
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.rollout.turn_request import TurnRoutedRequest
from toolwise.rollout.worker import build_termination
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, RouteDecision
from toolwise.untrusted.user_code import call_user_code, describe


class Episode(Protocol):
    """One rollout to run: `AsyncRolloutRequest`, or a sibling of it."""

    batch_data_id: int

    async def run(self) -> None: ...

    def to_rollout(self) -> Rollout: ...


@dataclass(frozen=True, slots=True)
class RolloutScheduler:
    """Runs the episodes of a batch. With `lock_step` all episodes take each turn together: slow tools hold up the
    others, but the batches the model sees no longer depend on timing."""

    policy: AgentPolicy
    tools: Mapping[str, BaseTool]
    max_episode_steps: int = 10
    max_concurrent: int = 1024
    deadline_s: float = 600.0
    tool_timeout_s: float = 30.0
    max_tokens: int | None = None
    """Sampled tokens per episode."""
    max_invalid_in_a_row: int = 3
    max_result_chars: int = 4000
    limits: Limits = field(default_factory=Limits)
    make_env: Callable[[RouteDecision], BaseEnv] | None = None
    """Creates the environment of an episode; by default a `ToolEnv` over `tools`."""
    lock_step: bool = False
    gate: AdaptiveGate | None = None
    """Limits the episodes of all batches together, by measurement, instead of `max_concurrent`."""
    on_state: Callable[[AsyncRolloutRequest], None] | None = None
    """Called on every state change of every request."""

    async def roll_out(
        self,
        decisions: Sequence[RouteDecision],
        *,
        do_sample: bool = True,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        """Run all episodes and return their rollouts in order."""
        groups = [group async for group in self.groups(decisions, do_sample=do_sample, on_done=on_done)]
        return sorted(
            (rollout for group in groups for rollout in group), key=lambda r: (r.batch_data_id, r.rollout_offset)
        )

    async def groups(
        self,
        decisions: Sequence[RouteDecision],
        *,
        do_sample: bool = True,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
        step: int | None = None,
    ) -> AsyncIterator[list[Rollout]]:
        """Yield the rollouts of each decision as groups become complete. Closing the iterator cancels the rest. `step`
        is the training step that they are for, where that may not be the current one: a subclass whose workers compute
        rewards needs it."""
        if self.lock_step:
            requests = self.requests(decisions, do_sample=do_sample)
            for rollouts in await self._run_lock_step(requests, len(decisions)):
                for rollout in rollouts:
                    call_user_code(on_done, rollout)
                yield rollouts
            return
        gate = self.gate or Gate(self.max_concurrent)
        completed: asyncio.Queue[list[Rollout] | BaseException] = asyncio.Queue()
        group_sizes = {index: decision.n for index, decision in enumerate(decisions)}
        finished: dict[int, list[Rollout]] = {index: [] for index in group_sizes}
        for n in group_sizes.values():
            if n == 0:  # no request will ever complete it
                completed.put_nowait([])

        async def run(episode: Episode) -> None:
            async with gate:
                await episode.run()
            rollout = episode.to_rollout()
            if self.gate is not None:
                self.gate.observe(rollout)
            call_user_code(on_done, rollout)
            group = finished[episode.batch_data_id]
            group.append(rollout)
            if len(group) == group_sizes[episode.batch_data_id]:
                completed.put_nowait(sorted(finished.pop(episode.batch_data_id), key=lambda r: r.rollout_offset))

        def report_failure(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                completed.put_nowait(task.exception() or RuntimeError())

        tasks = [spawn(run(episode)) for episode in self.episodes(decisions, do_sample=do_sample)]
        for task in tasks:
            task.add_done_callback(report_failure)
        try:
            with relaxed_gc():
                for _ in group_sizes:
                    group_or_error = await completed.get()
                    if isinstance(group_or_error, BaseException):
                        raise group_or_error
                    yield group_or_error
        finally:
            for task in tasks:
                task.cancel()
            await wait_all(tasks)  # each releases its tools before the error or cancellation propagates

    def episodes(self, decisions: Sequence[RouteDecision], *, do_sample: bool = True) -> Sequence[Episode]:
        """What `groups` runs: `requests`, unless a subclass has others."""
        return self.requests(decisions, do_sample=do_sample)

    def requests(self, decisions: Sequence[RouteDecision], *, do_sample: bool = True) -> list[AsyncRolloutRequest]:
        """`n` requests per decision, ready to run; all requests of a decision see the same environment."""
        return [
            self._request(decision, batch_data_id, offset, do_sample)
            for batch_data_id, decision in enumerate(decisions)
            for offset in range(decision.n)
        ]

    async def _run_lock_step(self, requests: Sequence[AsyncRolloutRequest], groups: int) -> list[list[Rollout]]:
        """On cancellation, cancel the work once and wait for it: a second cancellation must not reach it."""
        work = spawn(self._run_turns(requests, groups))
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
            await wait_all([work])
        return work.result()

    async def _run_turns(self, requests: Sequence[AsyncRolloutRequest], groups: int) -> list[list[Rollout]]:
        for first in range(0, len(requests), self.max_concurrent):
            part = requests[first : first + self.max_concurrent]
            try:
                await gather_all(request.start() for request in part)
                while active := [request for request in part if not request.done]:
                    await gather_all(request.decide() for request in active)
                    await gather_all(request.act() for request in active)
            finally:
                await wait_all([spawn(request.finish()) for request in part])
        rollouts: list[list[Rollout]] = [[] for _ in range(groups)]
        for request in requests:
            rollouts[request.batch_data_id].append(request.to_rollout())
        return rollouts

    def _request(
        self, decision: RouteDecision, batch_data_id: int, offset: int, do_sample: bool
    ) -> AsyncRolloutRequest:
        task = decision.task
        request = AsyncRolloutRequest if decision.turns is None else TurnRoutedRequest
        return request(
            task,
            self.policy if decision.policy is None else decision.policy,
            self._env(decision) if decision.wrap_env is None else decision.wrap_env(self._env(decision)),
            batch_data_id=batch_data_id,
            rollout_offset=offset,
            group_id=decision.group_id,
            route=decision.route,
            prompt=decision.prompt,
            seed=decision.seed * 4099 + offset,
            env_seed=decision.seed,
            do_sample=do_sample,
            deadline_s=self.deadline_s,
            termination=build_termination(
                task,
                self.max_episode_steps,
                max_tokens=self.max_tokens,
                max_invalid_in_a_row=self.max_invalid_in_a_row,
            ),
            limits=self.limits,
            on_state=self.on_state,
            count_usage=decision.count_usage,
            decision=decision,
        )

    def _env(self, decision: RouteDecision) -> BaseEnv:
        if self.make_env is None:
            return ToolEnv(
                decision.task,
                self.tools,
                offered=decision.tools,
                forbidden=decision.forbidden,
                tool_timeout_s=self.tool_timeout_s,
                max_result_chars=self.max_result_chars,
                gates=self.limits.tools,
            )
        try:
            return call_user_code(self.make_env, decision)
        except ToolwiseError:  # a configuration error for the user to fix
            raise
        except Exception as fault:
            return FailedEnv(fault)


class FailedEnv(BaseEnv):
    """Stands in for an environment that could not be created: its episode ends before it starts."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    async def reset(self) -> str:
        raise RuntimeError(f"the environment could not be created: {describe(self.fault)}")

    async def step(self, action: Any) -> NoReturn:
        raise RuntimeError("there is no environment")
