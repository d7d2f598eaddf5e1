"""The worker pool of one sandbox: idle workers by function, plus one spare process that has already started."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from toolwise.rewards.printed_output import PrintCallback
from toolwise.sandbox.faults import SandboxError, WorkerFault
from toolwise.sandbox.layers.bubblewrap import MountView, host_namespaces, worker_view
from toolwise.sandbox.layers.hardening import Plan
from toolwise.sandbox.processes import Process, start_process
from toolwise.sandbox.scratch_root import ScratchRoot
from toolwise.sandbox.targets import Target, readable_folders, within
from toolwise.sandbox.worker import Worker

MAX_IDLE_FUNCTIONS = 4
"""Workers stay idle for this many functions, the latest: a reward may have several parts, each run at every step."""
MAX_PENDING_PRINTS = 8
"""Printed texts that are kept until `on_print` is set."""
log = logging.getLogger("toolwise.sandbox")


class Pool:
    """Lends each worker to one caller at a time."""

    def __init__(
        self,
        plan: Plan,
        *,
        workers: int,
        max_calls: int,
        timeout_s: float,
        require: bool,
        on_print: PrintCallback | None = None,
    ) -> None:
        self._plan, self._max_calls, self._timeout_s, self._require = plan, max_calls, timeout_s, require
        self.workers, self._on_print = workers, on_print
        self.left_running = 0
        """Number of processes that calls left running; they were killed."""
        self._reset()

    def _reset(self, *, closed: bool = False) -> None:
        self._slots = threading.BoundedSemaphore(self.workers)
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, list[Worker]] = OrderedDict()
        self._busy: set[Worker] = set()
        self._spare: Process | None = None
        self.scratch_root = ScratchRoot()
        self.closed = closed
        """Once closed, workers die because we killed them, so calls are not retried."""
        self.pid = os.getpid()

    @contextmanager
    def worker(self, target: Target, *, fresh: bool = False) -> Iterator[Worker]:
        """Lend a worker that has loaded `target`. It is ended if the block raises or leaves it unclean.

        `fresh`: start a new one. An idle worker may have been killed or stopped in the meantime.
        """
        with self._slots:
            worker = (None if fresh else self._take_idle(target)) or self._new_worker(target, fresh)
            try:
                yield worker
            except BaseException:
                worker.clean = False
                raise
            finally:
                self._put_back(target, worker)

    def _take_idle(self, target: Target) -> Worker | None:
        while True:
            with self._lock:
                idle = self._idle.get(target.reference)
                if not idle:
                    return None
                worker = idle.pop()
                self._busy.add(worker)
            if worker.is_ready():
                return worker
            self._end(worker)

    def _new_worker(self, target: Target, fresh: bool) -> Worker:
        """Start a worker; if not `fresh`, from the spare process if there is one.

        A worker that dies or is stopped before it starts loading user code is replaced once: the function is not to
        blame.
        """
        try:
            return self._start_worker(target, None if fresh else self._take_spare(target))
        except WorkerFault as fault:
            if not fault.not_received or self.closed:
                raise
            return self._start_worker(target, None)

    def _take_spare(self, target: Target) -> Process | None:
        with self._lock:
            process, self._spare = self._spare, None
        if process is None:
            return None
        if self._fits(process, target) and process.popen.poll() is None and not process.is_stopped():
            return process
        process.end(sweep=False)
        return None

    def _start_worker(self, target: Target, process: Process | None) -> Worker:
        with self._lock:
            if self.closed:
                if process is not None:
                    process.end(sweep=False)
                raise SandboxError("this sandbox is closed")
            if process is None:
                process = self._process(target)
        outside = host_namespaces(process.view)
        plan = replace(self._plan, read=self._readable(target), scratch=str(process.scratch), outside=outside)
        worker = Worker(process, plan, self._on_print, target.reference)
        with self._lock:
            self._busy.add(worker)
        try:
            try:
                worker.seal(target, [path for path in sys.path if path and within(path, self._plan.read)])
            except WorkerFault as fault:
                fault.not_received = True
                raise
            if worker.missing and self._require:
                raise SandboxError(f"require=True, but a worker could not enable: {', '.join(worker.missing)}")
            worker.load(self._timeout_s)
        except BaseException as fault:
            if isinstance(fault, WorkerFault):
                fault.loading = True
            self._end(worker)
            raise
        finally:
            with self._lock, suppress(SandboxError):  # start the next process while this worker is busy
                if self._spare is None and not self.closed:
                    self._spare = self._process(target)
        return worker

    def _fits(self, process: Process, target: Target) -> bool:
        """Whether a started process can serve `target`: in namespaces it sees the files of one function only."""
        if process.view is None:
            return True
        wanted = self._view(target, process.scratch)
        return wanted is not None and wanted.read == process.view.read

    def _readable(self, target: Target) -> tuple[str, ...]:
        return (*readable_folders(), *target.read, *self._plan.read)

    def _view(self, target: Target, scratch: Path) -> MountView | None:
        file_mb = self._plan.file_mb if self._plan.own_disk else None
        return worker_view(self._plan.layers, self._readable(target), str(scratch), self._plan.permissions, file_mb)

    def _process(self, target: Target) -> Process:
        scratch = self.scratch_root.new_folder()
        return start_process(scratch, self._view(target, scratch), supervised=self._plan.may_have_children)

    def _put_back(self, target: Target, worker: Worker) -> None:
        if not worker.clean or worker.calls >= self._max_calls or self.closed:
            self._end(worker)
            return
        worker.load_deadline = 0.0
        with self._lock:
            self._busy.discard(worker)
            idle = self._idle.setdefault(target.reference, [])
            idle.append(worker)
            self._idle.move_to_end(target.reference)
            surplus = [idle.pop(0)] if len(idle) > self.workers else []
            if len(self._idle) > MAX_IDLE_FUNCTIONS:
                surplus += self._idle.popitem(last=False)[1]
        for old in surplus:
            self._end(old)

    def _end(self, worker: Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
        worker.end()
        count = worker.leftover_count
        with self._lock:
            first, self.left_running = not self.left_running, self.left_running + count
        if count and first:
            log.warning(
                "reward %s left %d process%s running; killed (reported once; all are counted)",
                worker.target,
                count,
                "es" * (count > 1),
            )

    def pids(self) -> list[int]:
        with self._lock:
            spare = [self._spare.pid] if self._spare is not None else []
            return [worker.process.pid for worker in (*self._busy, *self._all_idle())] + spare

    def _all_idle(self) -> list[Worker]:
        return [worker for workers in self._idle.values() for worker in workers]

    def close(self) -> None:
        """End every worker, even during a call; the caller then gets a `died` fault."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            idle, busy = self._all_idle(), list(self._busy)
            spare, self._spare = self._spare, None
            self._idle.clear()
        for worker in busy:  # its caller's thread cleans up
            worker.process.popen.kill()
        for worker in idle:
            worker.end()
        if spare is not None:
            spare.end(sweep=False)
        end = time.monotonic() + 2.0
        while self._busy and time.monotonic() < end:
            time.sleep(0.005)
        self.scratch_root.close()

    def abandon(self) -> None:
        """In a forked child: close our copies of the descriptors (the workers belong to the parent) and start empty."""
        for worker in (*self._all_idle(), *self._busy):
            worker.close_fds()
        if self._spare is not None:
            self._spare.close_fds()
        self.scratch_root.close()
        self._reset(closed=self.closed)


class PrintForwarder:
    """Passes on what user code prints. Output from before the callback was set (on import) is delivered first."""

    def __init__(self) -> None:
        self.on_print: PrintCallback | None = None
        self._pending: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def set(self, on_print: PrintCallback | None) -> None:
        with self._lock:
            self.on_print = on_print
            pending, self._pending = self._pending, []
        for label, text in pending:
            self(label, text)

    def __call__(self, label: str, text: str) -> None:
        with self._lock:
            on_print = self.on_print
            if on_print is None and len(self._pending) < MAX_PENDING_PRINTS:
                self._pending.append((label, text))
        if on_print is not None:
            on_print(label, text)
