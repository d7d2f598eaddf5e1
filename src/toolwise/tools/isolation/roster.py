"""The state of every worker process; used by `tool_pool.py` under its lock."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal

from toolwise.tools.isolation.code_location import ModuleRef
from toolwise.tools.isolation.tool_process import Zygote
from toolwise.tools.isolation.tool_worker import ToolWorker

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

State = Literal["starting", "busy", "slow", "reserved", "idle"]
"""`busy`: working, and counted against the limit. `slow`: working but not counted, as it sleeps or takes too long.
`reserved`: held by one rollout."""


class Roster:
    """Every worker has a state, or is the zygote of its module."""

    def __init__(self) -> None:
        self._states: dict[ToolWorker, State] = {}
        self.zygotes: dict[ModuleRef, tuple[ToolWorker, Zygote]] = {}
        self.unshared_modules: set[ModuleRef] = set()
        """Modules that each worker loads separately."""
        self.killed_while_starting: Counter[ModuleRef] = Counter()
        """Workers killed while starting since the last successful start."""
        self._lost_zygotes: Counter[ModuleRef] = Counter()
        self._last_used: dict[ToolWorker, float] = {}
        """When an idle worker or a zygote was last used."""

    def workers(self, *states: State, of: ModuleRef | None = None) -> list[ToolWorker]:
        """Those in one of the states, of one module or all; the last to get its state comes last."""
        listed = list(self._states.items())
        return [worker for worker, state in listed if state in states and of in (None, worker.module_ref)]

    def state_of(self, worker: ToolWorker) -> State | None:
        return self._states.get(worker)

    def set_state(self, worker: ToolWorker, state: State) -> None:
        self.drop(worker)
        self._states[worker] = state
        if state == "idle":
            self._last_used[worker] = time.monotonic()

    def drop(self, worker: ToolWorker) -> bool:
        """Remove the worker; True if it was listed other than as a zygote."""
        self._last_used.pop(worker, None)
        if self._is_zygote(worker):
            del self.zygotes[worker.module_ref]
        return self._states.pop(worker, None) is not None

    def register_started(self, worker: ToolWorker) -> bool:
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

    def should_restart(self, worker: ToolWorker) -> bool:
        """Whether to replace a worker that failed to start because its zygote was gone or it was killed: the module is
        not the cause, unless that happens repeatedly. A lost zygote is replaced too; after `MAX_LOST` losses each
        worker loads the module separately."""
        module_ref = worker.module_ref
        if worker.zygote is None or not worker.zygote.gone:
            self.killed_while_starting[module_ref] += 1
            return worker.was_killed and self.killed_while_starting[module_ref] < MAX_LOST
        held, zygote = self.zygotes.get(module_ref, (None, None))
        if zygote is worker.zygote and held is not None:
            self.drop(held)
            self._lost_zygotes[module_ref] += 1
            if self._lost_zygotes[module_ref] >= MAX_LOST:
                self.unshared_modules.add(module_ref)
        return True

    def zygote_of(self, module_ref: ModuleRef) -> Zygote | None:
        worker, zygote = self.zygotes.get(module_ref, (None, None))
        if worker is not None:
            self._last_used[worker] = time.monotonic()
        return zygote

    def reclassify(self, now: float) -> None:
        """Sort working workers into `busy` and `slow`."""
        for worker in self.workers("busy", "slow"):
            age = now - worker.call_started_at if worker.call_started_at is not None else 0.0
            computes = age < POLL_S / 2 or (age < MAX_COMPUTE_S and worker.is_computing())
            self._states[worker] = "busy" if (age < SLOW_S if worker.zygote is None else computes) else "slow"

    def expired(self, now: float) -> list[ToolWorker]:
        return [
            worker
            for worker, used in self._last_used.items()
            if now - used > (IDLE_S if worker.zygote is not None else IDLE_LOADED_S)
            and not (self._is_zygote(worker) and self.worker_count(worker.module_ref))
        ]

    def longest_idle(self, *, besides: ModuleRef, unshared: bool) -> ToolWorker | None:
        """The longest idle worker of another module; `unshared`: only among those that share no memory."""
        others = [worker for worker in self.workers("idle") if worker.module_ref != besides]
        return next((worker for worker in others if not unshared or worker.zygote is None), None)

    def has_idle(self) -> bool:
        return bool(self._last_used)

    def slots_in_use(self) -> int:
        """Number of workers that compute, or load a module."""
        return len(self.workers("busy")) + sum(worker.zygote is None for worker in self.workers("starting"))

    def process_count(self) -> int:
        return len(self._states)

    def unshared_count(self) -> int:
        """Number of workers without a zygote that are idle, starting or busy."""
        return sum(worker.zygote is None for worker in self.workers("starting", "busy", "idle"))

    def computing_count(self, module_ref: ModuleRef) -> int:
        """Number of the module's workers that compute; 0 if its calls are known to sleep."""
        return 0 if self.workers("slow", of=module_ref) else len(self.workers("busy", of=module_ref))

    def worker_count(self, module_ref: ModuleRef) -> int:
        return sum(worker.module_ref == module_ref for worker in self._states)

    def _is_zygote(self, worker: ToolWorker) -> bool:
        return self.zygotes.get(worker.module_ref, (None, None))[0] is worker
