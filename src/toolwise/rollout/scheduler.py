"""Many episodes at once: `n` a prompt, given back in the order (prompt, offset) whatever finished first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from toolwise.envs.tool_env import ToolEnv
from toolwise.protocols import AgentPolicy
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, RouteDecision, StopReason
from toolwise.waiting import all_of


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
    lock_step: bool = False

    async def roll_out(
        self,
        decisions: Sequence[RouteDecision],
        *,
        do_sample: bool = True,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        workers = [
            (decision, batch_data_id, offset, self._worker(decision, offset, do_sample))
            for batch_data_id, decision in enumerate(decisions)
            for offset in range(decision.n)
        ]
        if self.lock_step:
            for first in range(0, len(workers), self.max_concurrent):
                await self._in_step([worker for *_, worker in workers[first : first + self.max_concurrent]])
            rollouts = [_finished(*entry) for entry in workers]
            for rollout in rollouts:
                on_done(rollout)
            return rollouts
        gate = asyncio.Semaphore(self.max_concurrent)

        async def run(decision: RouteDecision, batch_data_id: int, offset: int, worker: RLRolloutWorker) -> Rollout:
            async with gate:
                await worker.run_episode()
            rollout = _finished(decision, batch_data_id, offset, worker)
            on_done(rollout)
            return rollout

        tasks = [asyncio.create_task(run(*entry)) for entry in workers]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # each frees its tools before the fault goes on
            raise

    async def _in_step(self, workers: Sequence[RLRolloutWorker]) -> None:
        try:
            await all_of(worker.start() for worker in workers)
            while active := [worker for worker in workers if not worker.done]:
                await all_of(worker.decide() for worker in active)
                await all_of(worker.act() for worker in active)
        finally:
            await all_of(worker.finish() for worker in workers)

    def _worker(self, decision: RouteDecision, offset: int, do_sample: bool) -> RLRolloutWorker:
        return RLRolloutWorker(
            decision.task,
            self.policy,
            self.max_episode_steps,
            env=ToolEnv(decision.task, self.tools, offered=decision.tools, tool_timeout_s=self.tool_timeout_s),
            prompt=decision.prompt,
            seed=decision.seed * 4099 + offset,
            do_sample=do_sample,
            deadline_s=self.deadline_s,
        )


def _finished(decision: RouteDecision, batch_data_id: int, offset: int, worker: RLRolloutWorker) -> Rollout:
    return Rollout(
        rollout_id=f"{decision.group_id}/{offset}",
        group_id=decision.group_id,
        batch_data_id=batch_data_id,
        rollout_offset=offset,
        task=decision.task,
        route=decision.route,
        steps=tuple(worker.steps),
        messages=tuple(worker.messages),
        stop_reason=worker.stop_reason or StopReason.POLICY_FAULT,
        usage=worker.usage,
        tool_rewards=worker.tool_rewards,
        fault=worker.fault,
    )
