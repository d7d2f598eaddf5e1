"""The state of every worker process; used by `pool.py` under its lock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from toolwise.tools.isolation.code_location import ModuleRef
from toolwise.tools.isolation.worker import Worker
from toolwise.tools.isolation.zygote import Zygote

POLL_S = 0.05
"""How often calls are checked while callers wait: a call that sleeps uses no core and does not count."""
SLOW_S = 1.0
"""A call of a worker that shares no memory counts this long; there should be few such workers."""
MAX_COMPUTE_S = 10.0
"""A call that computes for longer may be hanging: it no longer counts."""
MAX_LOST = 3
"""After this many zygotes or starting workers were killed, the module is considered the cause."""
IDLE_S = 30.0
"""How long an idle worker is kept."""
IDLE_LOADED_S = 300.0
"""The same for a process that would have to load its module again: a zygote, or an unshared worker."""


class Roster:
    """Every worker is in one of `starting`, `busy`, `slow`, `reserved`, `idle`, or is the zygote of its module."""

    def __init__(self) -> None:
        self.starting: set[Worker] = set()
        self.busy: set[Worker] = set()
        """Working, and counted against the limit."""
        self.slow: set[Worker] = set()
        """Working but not counted: sleeping, or taking too long."""
        self.reserved: set[Worker] = set()
        """Held by one rollout."""
        self.idle: dict[ModuleRef, list[Worker]] = {}
        self.zygotes: dict[ModuleRef, tuple[Worker, Zygote]] = {}
        self.unshared_modules: set[ModuleRef] = set()
        """Modules that each worker loads separately."""
        self.killed_while_starting: Counter[ModuleRef] = Counter()
        """Workers killed while starting since the last successful start."""
        self._lost_zygotes: Counter[ModuleRef] = Counter()
        self._last_used: dict[Worker, float] = {}
        """When an idle worker or a zygote was last used."""

    def register_started(self, worker: Worker) -> bool:
        """Record whether the module of a started worker can be shared; True if it is now the module's zygote."""
        if worker.zygote is not None:
            return False
        if worker.forkable and worker.module_ref not in self.zygotes:
            try:
                self.zygotes[worker.module_ref] = (worker, worker.become_zygote())
            except OSError:  # it is dying
                self.unshared_modules.add(worker.module_ref)
            else:
                self._last_used[worker] = time.monotonic()
            return True
        if not worker.forkable:
            self.unshared_modules.add(worker.module_ref)
        return False

    def should_restart(self, worker: Worker) -> bool:
        """Whether to replace a worker that failed to start because its zygote was gone or it was killed: the module is
        not the cause, unless that happens repeatedly. A lost zygote is replaced too; after `MAX_LOST` losses each
        worker loads the module separately."""
        module_ref = worker.module_ref
        if worker.zygote is None or not worker.zygote.gone:
            self.killed_while_starting[module_ref] += 1
            return worker.was_killed and self.killed_while_starting[module_ref] < MAX_LOST
        held, zygote = self.zygotes.get(module_ref, (None, None))
        if zygote is worker.zygote and held is not None:
            del self.zygotes[module_ref]
            self._last_used.pop(held, None)
            self._lost_zygotes[module_ref] += 1
            if self._lost_zygotes[module_ref] >= MAX_LOST:
                self.unshared_modules.add(module_ref)
        return True

    def zygote_of(self, module_ref: ModuleRef) -> Zygote | None:
        worker, zygote = self.zygotes.get(module_ref, (None, None))
        if worker is not None:
            self._last_used[worker] = time.monotonic()
        return zygote

    def add_idle(self, worker: Worker) -> None:
        self.idle.setdefault(worker.module_ref, []).append(worker)
        self._last_used[worker] = time.monotonic()

    def drop(self, worker: Worker) -> bool:
        """Remove the worker; True if it was listed other than as a zygote."""
        self._last_used.pop(worker, None)
        for group in (self.starting, self.busy, self.slow, self.reserved):
            if worker in group:
                group.discard(worker)
                return True
        idle = self.idle.get(worker.module_ref, [])
        if worker in idle:
            idle.remove(worker)
            return True
        held, _ = self.zygotes.get(worker.module_ref, (None, None))
        if held is worker:
            del self.zygotes[worker.module_ref]
        return False

    def reclassify(self, now: float) -> None:
        """Sort working workers into `busy` and `slow`."""
        for worker in (*self.busy, *self.slow):
            target, other = (self.busy, self.slow) if _counts_as_busy(worker, now) else (self.slow, self.busy)
            other.discard(worker)
            target.add(worker)

    def expired(self, now: float) -> list[Worker]:
        """Workers that have been unused for too long."""
        return [
            worker
            for worker, used in self._last_used.items()
            if now - used > (IDLE_S if worker.zygote is not None else IDLE_LOADED_S)
            and not (self._is_zygote(worker) and self.worker_count(worker.module_ref))
        ]

    def longest_idle(self, *, besides: ModuleRef, unshared: bool) -> Worker | None:
        """The longest idle worker of another module; `unshared`: only among those that share no memory."""
        others = (worker for worker in self._all_idle() if worker.module_ref != besides)
        idle = (worker for worker in others if not unshared or worker.zygote is None)
        return min(idle, key=lambda worker: self._last_used[worker], default=None)

    def has_idle(self) -> bool:
        return bool(self._last_used)

    def slots_in_use(self) -> int:
        """Number of workers that compute, or load a module."""
        return len(self.busy) + sum(worker.zygote is None for worker in self.starting)

    def process_count(self) -> int:
        return (
            len(self.starting)
            + len(self.busy)
            + len(self.slow)
            + len(self.reserved)
            + sum(map(len, self.idle.values()))
        )

    def unshared_count(self) -> int:
        """Number of workers without a zygote that are idle, starting or busy."""
        return sum(worker.zygote is None for group in (self.starting, self.busy, self._all_idle()) for worker in group)

    def starting_count(self, module_ref: ModuleRef) -> int:
        return sum(worker.module_ref == module_ref for worker in self.starting)

    def is_working(self, worker: Worker) -> bool:
        return worker in self.busy or worker in self.slow or worker in self.reserved

    def computing_count(self, module_ref: ModuleRef) -> int:
        """Number of the module's workers that compute; 0 if its calls are known to sleep."""
        if any(worker.module_ref == module_ref for worker in self.slow):
            return 0
        return sum(worker.module_ref == module_ref for worker in self.busy)

    def working_count(self, module_ref: ModuleRef) -> int:
        groups = (self.starting, self.busy, self.slow, self.reserved)
        return sum(worker.module_ref == module_ref for group in groups for worker in group)

    def worker_count(self, module_ref: ModuleRef) -> int:
        return self.working_count(module_ref) + len(self.idle.get(module_ref, ()))

    def _all_idle(self) -> Iterator[Worker]:
        return (worker for workers in self.idle.values() for worker in workers)

    def _is_zygote(self, worker: Worker) -> bool:
        return any(worker is zygote for zygote, _ in self.zygotes.values())


def _counts_as_busy(worker: Worker, now: float) -> bool:
    age = now - worker.call_started_at if worker.call_started_at is not None else 0.0
    if worker.zygote is None:
        return age < SLOW_S
    return age < POLL_S / 2 or (age < MAX_COMPUTE_S and worker.is_computing())
