"""Supervision of the rollout workers: gives out tickets, gives them out again when a worker dies or hangs, starts
another worker within a budget, and keeps the weights of all of them at the published version.

A ticket carries its seeds, so the worker that gets it next rolls out the same group. Exactly one reply of a ticket is
returned: a worker that missed a deadline is killed, and what it may have finished is never read. Every wait ends: a
call and a start have deadlines, and deaths have a budget.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from toolwise.cluster.interface import (
    CallTimeoutError,
    Cluster,
    ClusterError,
    Payload,
    Process,
    ProcessDiedError,
    RefusedError,
    Resources,
    Stored,
)
from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.config.cluster import ClusterConfig

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Wait before a worker is started again, doubled after each start that failed."""
KILL_S = 30.0
Lost = (ProcessDiedError, CallTimeoutError)


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the weights, as it is sent."""

    version: int
    whole: Callable[[], Awaitable[Stored]]
    """All weights, of this version or a newer one."""
    base: int = -1
    """The version that `difference` is from."""
    difference: Stored | None = None


@dataclass(eq=False, slots=True)
class Worker:
    """A worker that takes tickets."""

    process: Process
    version: int
    load: int = 0
    """Tickets it has."""
    finished: int = 0

    @property
    def name(self) -> str:
        return self.process.name


@dataclass(eq=False)
class WorkerPool:
    """`spec` and `stored` are what each worker is started with; `slots` are the tickets that each may have, each of
    which takes up to `call_s`. `on_event` is told what happens: a kind, a worker's name and numbers."""

    cluster: Cluster
    config: ClusterConfig
    spec: Payload
    stored: Stored | None = None
    slots: int = 1
    call_s: float = 720.0
    on_event: Callable[..., None] = lambda kind, worker, **numbers: None
    workers: list[Worker] = field(default_factory=list)
    publication: Publication | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """deaths, reissued tickets, refused transfers, whole and partial transfers"""
    _failure: ClusterError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def start(self) -> None:
        """Start all workers and wait for them; raises if their code fails or too many die."""
        self._spawn(self._watch())
        starts = [self._spawn(self._start(f"worker-{index}")) for index in range(self.config.workers)]
        await wait_all(starts)
        self._raise_failure()

    async def run(self, ticket: Payload, stored: Stored | None = None) -> Payload:
        """The reply of a worker to a ticket, which is given to another one for as long as workers die over it."""
        while True:
            worker = await self._acquire()
            began = asyncio.get_running_loop().time()
            try:
                reply = await self.cluster.call(
                    worker.process, "roll_out", ticket, deadline_s=self.call_s, stored=stored
                )
                worker.finished += 1
                self.on_event("group", worker.name, seconds=asyncio.get_running_loop().time() - began)
                return reply
            except Lost as fault:
                self.counts["reissued"] += 1
                self._lose(worker, str(fault))
            finally:
                worker.load -= 1
                self._wake()

    async def publish(self, publication: Publication) -> None:
        """Give every worker a version of the weights. One that cannot take it is replaced by a new one that has it."""
        self.publication = publication
        await asyncio.gather(*(self._update(worker) for worker in list(self.workers)))
        self._raise_failure()

    async def close(self) -> None:
        """End all workers."""
        self._failure = self._failure or ClusterError("the workers were stopped")
        for task in self._tasks:
            task.cancel()
        await wait_all(list(self._tasks), KILL_S)
        workers, self.workers = self.workers, []
        await asyncio.gather(*(self.cluster.kill(worker.process) for worker in workers))
        self._wake()

    # --- tickets

    async def _acquire(self) -> Worker:
        """Wait for the least busy worker with a free slot."""
        while True:
            self._raise_failure()
            free = [worker for worker in self.workers if worker.load < self.slots]
            if free:
                worker = min(free, key=lambda worker: (worker.load, worker.finished))
                worker.load += 1
                return worker
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- workers

    async def _watch(self) -> None:
        """Notice the deaths of workers that have nothing to do."""
        async for exited in self.cluster.events():
            for worker in [worker for worker in self.workers if worker.process == exited.process]:
                self._lose(worker, exited.reason)

    def _lose(self, worker: Worker, reason: str) -> None:
        """Stop using a worker and start another one in its place."""
        if worker not in self.workers:
            return  # known: all its tickets come back
        self.workers.remove(worker)
        self._spawn(self._kill(worker.process))
        if self._count_death(worker.name, reason):
            self._spawn(self._start(worker.name))

    def _count_death(self, name: str, reason: str) -> bool:
        """Whether another worker may be started."""
        self.counts["deaths"] += 1
        self.on_event("death", name)
        if self.counts["deaths"] <= self.config.max_restarts:
            return True
        self._fail(
            ClusterError(
                f"rollout workers died {self.counts['deaths']} times, more often than cluster.max_restarts allows; "
                f"last {name}: {reason}"
            )
        )
        return False

    async def _start(self, name: str) -> None:
        """Start a worker, with the weights of the others, and try again if it dies on the way."""
        backoff_s, config = BACKOFF_S, self.config
        resources = Resources(config.worker_cpus, config.worker_gpus)
        while self._failure is None:
            process: Process | None = None
            try:
                process = await self.cluster.start(
                    "rollout", name, self.spec, resources, deadline_s=config.start_s, stored=self.stored
                )
                worker = Worker(process, version=0)
                while self.publication is not None and worker.version < self.publication.version:
                    await self._send(worker)
                self.workers.append(worker)
                self.on_event("start", name, number=process.number)
                return self._wake()
            except (*Lost, RefusedError) as fault:
                if process is not None:
                    await self._kill(process)
                if not self._count_death(name, str(fault)):
                    return None
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            except Exception as fault:  # its code or its settings: another one would fail too
                return self._fail(fault if isinstance(fault, ClusterError) else ClusterError(f"{name}: {fault}"))
        return None

    async def _kill(self, process: Process) -> None:
        try:
            async with asyncio.timeout(KILL_S):
                await self.cluster.kill(process)
        except (TimeoutError, ClusterError):
            self.counts["not_killed"] += 1

    def _fail(self, fault: ClusterError) -> None:
        self._failure = self._failure or fault
        self._wake()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- weights

    async def _update(self, worker: Worker) -> None:
        try:
            await self._send(worker)
        except (*Lost, RefusedError) as fault:
            self._lose(worker, str(fault))

    async def _send(self, worker: Worker) -> None:
        """Give a worker the current version: the difference if it has the version before, else all weights."""
        publication = self.publication
        assert publication is not None
        if worker.version >= publication.version:  # it has started meanwhile, with the newest
            return
        if publication.difference is not None and worker.version == publication.base:
            try:
                await self._install(worker, publication.difference)
                self.counts["differences"] += 1
                return
            except RefusedError:
                self.counts["refused"] += 1
        await self._install(worker, await publication.whole())
        self.counts["whole_copies"] += 1

    async def _install(self, worker: Worker, weights: Stored) -> None:
        began = asyncio.get_running_loop().time()
        limit_s = self.config.transfer_s
        reply = await self.cluster.call(worker.process, "install", {}, deadline_s=limit_s, stored=weights)
        worker.version = int(reply["version"])
        seconds = asyncio.get_running_loop().time() - began
        self.on_event("weights", worker.name, seconds=seconds, bytes=weights.bytes)
