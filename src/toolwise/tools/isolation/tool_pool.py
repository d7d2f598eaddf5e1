"""A pool of warm worker processes for tools, per module; a worker is killed when its caller is cancelled.

Callers may wait on any event loop, in sequence or concurrently; no loop is blocked, and the wait does not count towards
a call's deadline. `limit` bounds the calls that compute at once: on two cores 64 concurrent computations would all be
late, while in sequence none is. A call that sleeps, as most blocking calls do, uses no core, so more calls are let in,
each in its own process, up to `max_processes`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from toolwise.concurrency.deadlines import exclude_queue_time, wake
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.roster import POLL_S, Roster
from toolwise.tools.isolation.tool_process import CAN_FORK
from toolwise.tools.isolation.tool_worker import (
    LOAD_TIMEOUT_S,
    CallNotDelivered,
    LoadFault,
    ResourcesExhausted,
    ToolDied,
    ToolFault,
    ToolWorker,
)

T = TypeVar("T")
MAX_PROCESSES = 256
"""Maximum number of processes, however slow their calls; the limit of open files may lower it."""
DESCRIPTORS_PER_WORKER = 5
"""Open files of the trainer per worker: its channel, output, lifeline and pidfd, and one spare."""
RESERVED_DESCRIPTORS = 256
"""Open files reserved for the rest of the trainer: checkpoints, connections, the reward sandbox."""
ATTEMPTS = 3
"""Attempts for a call whose process dies before it has received the call."""
START_PAUSE_S = 0.25
"""How long to wait after the system could not start a process."""
IDLE_CHECK_S = 1.0
RESERVE_TIMEOUT_S = LOAD_TIMEOUT_S + 30.0
"""How long an isolated tool waits for a process while `max_processes` are in use."""


def default_limit() -> int:
    """Maximum number of calls that compute at once: TOOLWISE_TOOL_WORKERS, or four per core up to 32."""
    with suppress(ValueError):
        return max(1, int(os.environ.get("TOOLWISE_TOOL_WORKERS", "")))
    return min(32, 4 * (os.cpu_count() or 1))


def default_max_processes() -> int:
    """The number of processes that the limit of open files (`ulimit -n`) allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_PROCESSES
        if soft == resource.RLIM_INFINITY
        else min(MAX_PROCESSES, (soft - RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_WORKER)
    )


class _Waiter:
    """A caller that waits for a worker on its event loop. `for_rollout`: to keep it for a whole rollout."""

    def __init__(self, *, for_rollout: bool = False) -> None:
        self.worker: ToolWorker | None = None
        self.fault: ToolDied | None = None
        self.for_rollout = for_rollout
        self.since = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self._loop.create_future()

    def resolve(self, worker: ToolWorker | None, fault: ToolDied | None = None) -> bool:
        """False if the caller's loop is closed."""
        self.worker, self.fault = worker, fault
        try:
            self._loop.call_soon_threadsafe(wake, self.woken)
        except RuntimeError:
            self.worker = None
            return False
        return True


class ToolPool:
    """Gives each worker to one caller at a time. Workers start in the background; callers only wait for one.

    The first process of a module loads it and becomes its zygote, from which all others are forked. If a module cannot
    be shared (`forks.can_be_forked`), each worker loads it, and there are at most `limit` workers besides those in slow
    calls.
    """

    def __init__(self, limit: int | None = None, max_processes: int | None = None) -> None:
        self.limit = limit if limit is not None else default_limit()
        self.max_processes = max(max_processes if max_processes is not None else default_max_processes(), self.limit)
        self.killed = 0
        """Number of workers that were killed or died during a call."""
        self._reset()

    def _reset(self, *, closed: bool = False) -> None:
        self._lock = threading.Lock()
        self._unserved = threading.Event()
        """Set while callers wait for a worker."""
        self._watching = False
        self._roster = Roster()
        self._waiting: dict[ModuleRef, deque[_Waiter]] = {}
        self._live_workers: set[ToolWorker] = set()
        self._paused_until = 0.0
        self.closed = closed

    async def run(
        self, target: ObjectRef, parameters: dict[str, Any], kwargs: dict[str, Any] | None = None
    ) -> tuple[str, float | None, dict[str, Any]]:
        """Call `target`, a function tool, with the model's and the task's arguments. Cancelling kills the process."""
        request = {"call": target.name, "parameters": parameters, "kwargs": kwargs or {}}

        async def call() -> tuple[str, float | None, dict[str, Any]]:
            async with self._worker(target.module_ref) as worker:
                return read_result(await worker.request(request))

        return await retry_undelivered(call)

    @asynccontextmanager
    async def _worker(self, module_ref: ModuleRef) -> AsyncIterator[ToolWorker]:
        worker = await self._get(module_ref)
        try:
            yield worker
        except ToolFault:  # raised by the tool: its process is still good
            self._put_back(worker)
            raise
        except BaseException as fault:
            self.killed += not isinstance(fault, CallNotDelivered)
            self.end(worker)
            raise
        self._put_back(worker)

    async def reserve(self, module_ref: ModuleRef) -> ToolWorker:
        """A worker to keep for a whole rollout: counts towards `max_processes`, not `limit`. Release it with `end`."""
        try:
            async with asyncio.timeout(RESERVE_TIMEOUT_S):
                return await self._get(module_ref, for_rollout=True)
        except TimeoutError:
            raise ToolDied(
                f"none of the {self.max_processes} worker processes was free within {RESERVE_TIMEOUT_S:g} s, as "
                "other rollouts keep theirs: lower rollout.max_concurrent"
            ) from None

    async def _get(self, module_ref: ModuleRef, *, for_rollout: bool = False) -> ToolWorker:
        with self._lock:
            if self.closed:
                raise ToolDied("the tool workers are closed")
            waiting = self._waiting.setdefault(module_ref, deque())
            free = not waiting and self._roster.slots_in_use() < self.limit
            worker = self._find_ready(module_ref) if free else None
            if worker is not None:  # the most common case
                self._roster.set_state(worker, "reserved" if for_rollout else "busy")
                return worker
            waiter = _Waiter(for_rollout=for_rollout)
            waiting.append(waiter)
            self._admit()
        try:
            with exclude_queue_time():
                await waiter.woken
        except BaseException:
            with self._lock, suppress(KeyError, ValueError):
                self._waiting[module_ref].remove(waiter)
            if waiter.worker is not None:
                self._put_back(waiter.worker)
            raise
        if waiter.worker is None:
            raise waiter.fault or ToolDied("no worker started")
        return waiter.worker

    def _find_ready(self, module_ref: ModuleRef) -> ToolWorker | None:
        """An idle worker; those that died while idle are removed."""
        for worker in reversed(self._roster.workers("idle", of=module_ref)):
            if worker.is_ready():
                return worker
            self._end_idle(worker)
        return None

    def end(self, worker: ToolWorker) -> None:
        worker.kill()
        with self._lock:
            self._replace(worker)

    def _replace(self, worker: ToolWorker) -> None:
        """Start another if callers wait, or if this was the last worker of its module."""
        module_ref, worked = worker.module_ref, self._roster.state_of(worker) in ("busy", "slow", "reserved")
        self._roster.drop(worker)
        if worked and not self.closed and not self._roster.worker_count(module_ref) and self._has_room(module_ref):
            self._start(module_ref)
        self._admit()

    def _put_back(self, worker: ToolWorker) -> None:
        with self._lock:
            if self._roster.state_of(worker) is not None:  # else it has died
                self._make_idle(worker)
                self._admit()

    def _make_idle(self, worker: ToolWorker) -> None:
        self._roster.set_state(worker, "idle")
        if (
            worker.zygote is None
            and self._roster.unshared_count() > self.limit
            and not self._waiting.get(worker.module_ref)
        ):
            self._end_idle(worker)

    # Scheduling.

    def _admit(self) -> None:
        """Give workers to callers up to the limit, and start workers for the rest. The module with the fewest working
        workers goes first, so that a busy module does not starve the others."""
        roster, refused = self._roster, set[ModuleRef]()
        while not self.closed:
            free = roster.slots_in_use() < self.limit
            waiting = [
                module_ref for module_ref, waiters in self._waiting.items() if waiters and module_ref not in refused
            ]
            candidates = [
                module_ref
                for module_ref in waiting
                if (free and roster.workers("idle", of=module_ref)) or self._needs_worker(module_ref, free)
            ]
            if not candidates:
                break
            module_ref = min(
                candidates,
                key=lambda module_ref: (
                    len(roster.workers("starting", "busy", "slow", "reserved", of=module_ref)),
                    self._waiting[module_ref][0].since,
                ),
            )
            worker = self._find_ready(module_ref) if free else None
            if worker is not None:
                self._assign(worker)
            elif self._has_room(module_ref) or self._make_room(module_ref):
                self._start(module_ref)
            else:
                refused.add(module_ref)
        self._ensure_watcher()

    def _needs_worker(self, module_ref: ModuleRef, free: bool) -> bool:
        """Whether to start another process of the module for its callers; `free`: whether it could work immediately.

        The first process starts alone, since the others are forked from it. When calls turn out to sleep, processes
        start ahead of demand, to be ready when their callers are admitted.
        """
        roster = self._roster
        waiting, starting = len(self._waiting[module_ref]), len(roster.workers("starting", of=module_ref))
        if module_ref in roster.zygotes:
            ready = len(roster.workers("starting", "idle", of=module_ref))
            return ready < waiting and ready + roster.computing_count(module_ref) < self.limit
        known = not CAN_FORK or module_ref in roster.unshared_modules
        return free and waiting > starting and (known or not starting)

    def _assign(self, worker: ToolWorker) -> None:
        waiting = self._waiting.get(worker.module_ref)
        while waiting:
            waiter = waiting.popleft()
            if waiter.resolve(worker):
                self._roster.set_state(worker, "reserved" if waiter.for_rollout else "busy")
                return
        self._make_idle(worker)

    def _has_room(self, module_ref: ModuleRef) -> bool:
        full = module_ref in self._roster.unshared_modules and self._roster.unshared_count() >= self.limit
        return not full and not self._is_full()

    def _is_full(self) -> bool:
        return self._roster.process_count() >= self.max_processes or time.monotonic() < self._paused_until

    def _make_room(self, module_ref: ModuleRef) -> bool:
        idle = self._roster.longest_idle(besides=module_ref, unshared=not self._is_full())
        if idle is not None:
            self._end_idle(idle)
        return idle is not None

    def _end_idle(self, worker: ToolWorker) -> None:
        self._roster.drop(worker)
        worker.kill()

    # Starting and stopping processes.

    def _start(self, module_ref: ModuleRef) -> None:
        worker = ToolWorker(
            module_ref, self._on_worker_started, self._on_worker_ended, self._roster.zygote_of(module_ref)
        )
        self._roster.set_state(worker, "starting")
        self._live_workers.add(worker)

    def _on_worker_started(self, worker: ToolWorker) -> None:
        with self._lock:
            if self._roster.state_of(worker) == "starting":
                self._roster.drop(worker)
                self._roster.killed_while_starting.pop(worker.module_ref, None)
                if not self._roster.register_started(worker):
                    self._make_idle(worker)
                self._admit()

    def _on_worker_ended(self, worker: ToolWorker, fault: ToolDied | None) -> None:
        with self._lock:
            self._live_workers.discard(worker)
            starting = self._roster.state_of(worker) == "starting"
            if starting and fault is not None and not self._roster.should_restart(worker):
                self._report_failed_start(worker.module_ref, fault)
            self._replace(worker)

    def _report_failed_start(self, module_ref: ModuleRef, fault: ToolDied) -> None:
        """Report why no worker started: to one waiting caller, or to all if the next would fail too; to none if one can
        start as soon as another process has ended."""
        waiting = self._waiting.get(module_ref) or deque()
        if isinstance(fault, ResourcesExhausted) and self._roster.process_count() > 1:
            self._paused_until = time.monotonic() + START_PAUSE_S
            return
        for _ in range(len(waiting) if isinstance(fault, LoadFault) else min(1, len(waiting))):
            waiting.popleft().resolve(None, fault)

    def _ensure_watcher(self) -> None:
        """Run a thread that checks calls while callers wait, and ends workers that have been idle too long."""
        if any(self._waiting.values()):
            self._unserved.set()
        if not self._watching and not self.closed and (self._unserved.is_set() or self._roster.has_idle()):
            self._watching = True
            threading.Thread(target=self._watch, args=(self._lock,), name="toolwise-tool-pool", daemon=True).start()

    def _watch(self, lock: threading.Lock) -> None:
        while True:
            if self._unserved.wait(IDLE_CHECK_S):
                time.sleep(POLL_S)
            with lock:
                self._roster.reclassify(time.monotonic())
                for worker in self._roster.expired(time.monotonic()):
                    self._end_idle(worker)
                self._unserved.clear()
                self._admit()
                if self.closed or not (self._unserved.is_set() or self._roster.has_idle()):
                    self._watching = False
                    return

    def pids(self) -> list[int]:
        """Process ids of the live workers, without zygotes."""
        with self._lock:
            zygotes = {worker for worker, _ in self._roster.zygotes.values()}
            return [worker.pid for worker in self._live_workers - zygotes if worker.pid is not None]

    def close(self) -> None:
        """End every worker, even during a call: its caller gets `ToolDied`."""
        with self._lock:
            self.closed = True
            zygotes = {worker for worker, _ in self._roster.zygotes.values()}
            workers = list(self._live_workers)
            waiting = [waiter for waiters in self._waiting.values() for waiter in waiters]
            self._waiting.clear()
            for waiter in waiting:
                waiter.resolve(None, ToolDied("the tool workers were closed"))
        until = time.monotonic() + 2.0
        # Zygotes last: they reap the others.
        for group in ([w for w in workers if w not in zygotes], zygotes):
            for worker in group:
                worker.kill()
            for worker in group:
                worker.thread.join(max(0.0, until - time.monotonic()))

    def abandon(self) -> None:
        """In a forked child: the workers belong to the parent, so forget them and start with none."""
        for worker in self._live_workers:
            worker.close_after_fork()
        self._reset(closed=self.closed)


async def retry_undelivered(attempt: Callable[[], Awaitable[T]]) -> T:
    """Try again, up to `ATTEMPTS` times in all, while the process dies before it has received the call."""
    for _ in range(ATTEMPTS - 1):
        with suppress(CallNotDelivered):
            return await attempt()
    return await attempt()


def read_result(value: Any) -> tuple[str, float | None, dict[str, Any]]:
    match value:
        case [str() as text, None | int() | float() as reward, dict() as info] if not isinstance(reward, bool):
            return text, reward, info
    raise ToolDied("the tool's process sent an unexpected reply")
