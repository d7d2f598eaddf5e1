"""Many episodes at once: `n` a prompt, given back in the order (prompt, offset) whatever finished first."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from toolwise.concurrency.deadlines import gather_all
from toolwise.concurrency.limits import Gate, Limits
from toolwise.concurrency.tasks import spawn
from toolwise.envs.base import BaseEnv
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ToolwiseError
from toolwise.protocols import AgentPolicy
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.rollout.worker import build_termination
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, RouteDecision
from toolwise.untrusted.user_code import call_user_code, describe

StateCallback = Callable[[AsyncRolloutRequest], None]
_GC_THRESHOLD = 50_000


@dataclass(frozen=True, slots=True)
class RolloutScheduler:
    """Runs the episodes of a batch. `lock_step` makes all take each turn together: slower tools hold the others up,
    and the batches the model sees no longer depend on timing."""

    policy: AgentPolicy
    tools: Mapping[str, BaseTool]
    max_episode_steps: int = 10
    max_concurrent: int = 1024
    deadline_s: float = 600.0
    tool_timeout_s: float = 30.0
    max_tokens: int | None = None
    """Sampled tokens of one episode."""
    max_invalid_in_a_row: int = 3
    max_result_chars: int = 4000
    limits: Limits = field(default_factory=Limits)
    make_env: Callable[[RouteDecision], BaseEnv] | None = None
    """The world of an episode; without it the tools are the world."""
    lock_step: bool = False
    on_state: StateCallback | None = None
    """Told of every change of every request's state."""

    async def roll_out(
        self,
        decisions: Sequence[RouteDecision],
        *,
        do_sample: bool = True,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        """All rollouts, in order."""
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
    ) -> AsyncIterator[list[Rollout]]:
        """The rollouts of each decision, as groups become complete. Whoever stops listening ends the rest."""
        requests = self.requests(decisions, do_sample=do_sample)
        if self.lock_step:
            for rollouts in await self._run_lock_step(requests, len(decisions)):
                for rollout in rollouts:
                    call_user_code(on_done, rollout)
                yield rollouts
            return
        gate = Gate(self.max_concurrent)
        whole: asyncio.Queue[list[Rollout] | BaseException] = asyncio.Queue()
        missing = {place: decision.n for place, decision in enumerate(decisions)}
        done: dict[int, list[Rollout]] = {place: [] for place in missing}
        for n in missing.values():
            if n == 0:  # nobody will ever complete it
                whole.put_nowait([])

        async def run(request: AsyncRolloutRequest) -> None:
            async with gate:
                await request.run()
            rollout = request.to_rollout()
            call_user_code(on_done, rollout)
            group = done[request.batch_data_id]
            group.append(rollout)
            if len(group) == missing[request.batch_data_id]:
                whole.put_nowait(sorted(done.pop(request.batch_data_id), key=lambda r: r.rollout_offset))

        def tell(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                whole.put_nowait(task.exception() or RuntimeError())

        tasks = [spawn(run(request)) for request in requests]
        for task in tasks:
            task.add_done_callback(tell)
        try:
            with relaxed_gc():
                for _ in missing:
                    found = await whole.get()
                    if isinstance(found, BaseException):
                        raise found
                    yield found
        finally:
            for task in tasks:
                task.cancel()
            await _wait_all(tasks)  # each frees its tools before the fault, or the cancellation, goes on

    def requests(self, decisions: Sequence[RouteDecision], *, do_sample: bool = True) -> list[AsyncRolloutRequest]:
        """`n` requests a decision, ready to run; all of one decision see the same world."""
        return [
            self._request(decision, batch_data_id, offset, do_sample)
            for batch_data_id, decision in enumerate(decisions)
            for offset in range(decision.n)
        ]

    async def _run_lock_step(self, requests: Sequence[AsyncRolloutRequest], groups: int) -> list[list[Rollout]]:
        """Ended once where somebody cancels, and then waited for: a second cancellation must not reach its work."""
        work = spawn(self._run_turns(requests, groups))
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
            await _wait_all([work])
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
                await _wait_all([spawn(request.finish()) for request in part])
        rollouts: list[list[Rollout]] = [[] for _ in range(groups)]
        for request in requests:
            rollouts[request.batch_data_id].append(request.to_rollout())
        return rollouts

    def _request(
        self, decision: RouteDecision, batch_data_id: int, offset: int, do_sample: bool
    ) -> AsyncRolloutRequest:
        task = decision.task
        return AsyncRolloutRequest(
            task,
            self.policy,
            self._env(decision),
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
        )

    def _env(self, decision: RouteDecision) -> BaseEnv:
        if self.make_env is None:
            return self._tool_env(decision)
        try:
            return call_user_code(self.make_env, decision)
        except ToolwiseError:  # for a person to put right
            raise
        except Exception as fault:
            return FailedEnv(fault)

    def _tool_env(self, decision: RouteDecision) -> ToolEnv:
        return ToolEnv(
            decision.task,
            self.tools,
            offered=decision.tools,
            forbidden=decision.forbidden,
            tool_timeout_s=self.tool_timeout_s,
            max_result_chars=self.max_result_chars,
            gates=self.limits.tools,
        )


class FailedEnv(BaseEnv):
    """In place of a world that could not be made: its episode ends before it begins."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    async def reset(self) -> str:
        raise RuntimeError(f"the environment could not be made: {describe(self.fault)}")

    async def step(self, action: Any) -> NoReturn:
        raise RuntimeError("there is no environment")


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Thousands of episodes keep what they make: looking through all of it for garbage every 700 objects, as Python
    does by default, takes as long as the work itself."""
    before = gc.get_threshold()
    if 0 < before[0] < _GC_THRESHOLD:  # neither switched off nor set higher, by us or by somebody who knows better
        gc.set_threshold(_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _wait_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Waits for all to end, however often somebody cancels the waiting."""
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
