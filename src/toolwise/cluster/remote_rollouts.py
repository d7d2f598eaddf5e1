"""The parts of a run that rollout workers take over: scheduling, rewards and the publication of weights. The loops use
them as they use those of one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.cluster.interface import Payload, Stored, same_payload
from toolwise.cluster.node_log import NodeLog
from toolwise.cluster.plain_data import to_payload
from toolwise.cluster.rollout_codec import ROUTER, group_from_payload, ticket_to_payload
from toolwise.cluster.weight_publisher import WeightPublisher
from toolwise.cluster.worker_pool import WorkerPool
from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.engine import Engine
from toolwise.errors import ConfigError
from toolwise.protocols import ModelPolicy, Router
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.inference_router import InferenceRouter
from toolwise.routing.turn_router import TurnRouter
from toolwise.training.evaluate import Scoring
from toolwise.training.run import Progress
from toolwise.training.weight_copies import WeightCopies
from toolwise.types import EvaluateResult, Rollout, RouteDecision
from toolwise.untrusted.user_code import call_user_code


@dataclass(eq=False)
class RolloutWorkers:
    """The workers as the parts below use them."""

    pool: WorkerPool
    publisher: WeightPublisher
    policy: ModelPolicy
    progress: Progress
    log: NodeLog
    router: Router
    results: dict[str, EvaluateResult] = field(default_factory=dict)
    """Rewards that workers computed, until they are asked for."""
    published: int = 0
    """The version that the workers have; the model folder's at the beginning."""
    _router_state: tuple[Payload, Stored | None] = field(default_factory=lambda: ({}, None))
    _busy: dict[str, float] = field(default_factory=dict)
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def publish(self, version: int) -> None:
        """Give the workers the learner's weights, unless they have this version."""
        async with self._publishing:
            if version != self.published:
                await self.pool.publish(await self.publisher.publication(version))
                self.published = version

    async def roll_out(
        self, decision: RouteDecision, index: int, do_sample: bool, step: int | None = None
    ) -> list[Rollout]:
        """The rollouts of a decision, by some worker. Rewards see `step`, that of the batch; None: the current one."""
        own_code = (decision.policy, decision.wrap_env, decision.count_usage)
        if not isinstance(self.router, InferenceRouter) and any(part is not None for part in own_code):
            raise ConfigError(
                "router.name: decisions with a policy, a counter or a wrapped environment need one process"
            )
        ticket = ticket_to_payload(decision, do_sample=do_sample)
        ticket["step"] = self.progress.step if step is None else step
        reply = dict(await self.pool.run(ticket, None if decision.turns is None else await self._store_router()))
        self._take_figures(reply)
        rollouts, results = group_from_payload(reply, decision, index)
        if results is not None:
            self.results |= {r.rollout_id: result for r, result in zip(rollouts, results, strict=True)}
        return rollouts

    async def _store_router(self) -> Stored:
        """What routes the turns on workers: stored once for all tickets until it changes."""
        assert isinstance(self.router, TurnRouter)
        state = {f"{ROUTER}{name}": value for name, value in to_payload(self.router.turn_state()).items()}
        known, stored = self._router_state
        if stored is None or not same_payload(state, known):
            stored = await self.pool.cluster.store(state, deadline_s=self.pool.config.transfer_s)
            self._router_state = state, stored
        return stored

    def _take_figures(self, reply: dict[str, Any]) -> None:
        """Logs and counters go to the run folder; the busy time of the workers' engines counts as this engine's, which
        samples nothing itself."""
        name = bytes(reply.pop("worker")).decode()
        busy_s, log, counters = float(reply.pop("busy_s")), bytes(reply.pop("log")), bytes(reply.pop("counters"))
        before = self._busy.get(name, 0.0)
        gained = busy_s - before if busy_s >= before else busy_s  # a new worker of this name begins at 0
        self._busy[name] = busy_s
        if isinstance(self.policy.engine, Engine):
            self.policy.engine.busy_s += gained / self.pool.config.workers
        self.log.add(name, log, json.loads(counters))


@dataclass(frozen=True, slots=True)
class RemoteScheduler(RolloutScheduler):
    """Runs the episodes of a batch on the workers, which have the policy's weights by then."""

    workers: RolloutWorkers = field(kw_only=True)

    async def groups(
        self,
        decisions: Sequence[RouteDecision],
        *,
        do_sample: bool = True,
        on_done: Callable[[Rollout], None] = lambda rollout: None,
        step: int | None = None,
    ) -> AsyncIterator[list[Rollout]]:
        await self.workers.publish(self.workers.policy.version)
        completed: asyncio.Queue[list[Rollout] | BaseException] = asyncio.Queue()

        async def run(index: int, decision: RouteDecision) -> None:
            try:
                group = await self.workers.roll_out(decision, index, do_sample, step) if decision.n else []
                for rollout in group:
                    call_user_code(on_done, rollout)
                completed.put_nowait(group)
            except Exception as fault:
                completed.put_nowait(fault)

        tasks = [spawn(run(index, decision)) for index, decision in enumerate(decisions)]
        try:
            for _ in tasks:
                group_or_error = await completed.get()
                if isinstance(group_or_error, BaseException):
                    raise group_or_error
                yield group_or_error
        finally:
            for task in tasks:
                task.cancel()
            await wait_all(tasks)


@dataclass(frozen=True, slots=True)
class RemoteScoring(Scoring):
    """Has the rewards that workers computed, and computes the others here."""

    workers: RolloutWorkers = field(kw_only=True)

    async def evaluate(self, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        known = {r.rollout_id: self.workers.results.pop(r.rollout_id, None) for r in rollouts}
        missing = [rollout for rollout in rollouts if known[rollout.rollout_id] is None]
        computed = await Scoring.evaluate(self, missing, step=step) if missing else []
        known |= {r.rollout_id: result for r, result in zip(missing, computed, strict=True)}
        results = [known[rollout.rollout_id] for rollout in rollouts]
        return [result for result in results if result is not None]


@dataclass(frozen=True, slots=True)
class RemoteWeights(WeightCopies):
    """Publishes to this process' engine, which the router uses, and to the workers."""

    workers: RolloutWorkers = field(kw_only=True)

    async def publish(self, version: int) -> None:
        await WeightCopies.publish(self, version)
        await self.workers.publish(version)
