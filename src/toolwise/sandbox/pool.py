"""The worker pool of one sandbox: idle workers by function, plus one spare process that has already started."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import sys
import tempfile
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
from toolwise.sandbox.layers.descriptors import closing_fd
from toolwise.sandbox.layers.hardening import Plan
from toolwise.sandbox.processes import Process, start_process
from toolwise.sandbox.scratch import FOLDER_FLAGS, remove_folder, remove_root
from toolwise.sandbox.targets import Target, readable_folders, within
from toolwise.sandbox.worker import Worker

PREFIX = "toolwise-sandbox-"
UNLOCKED_GRACE_S = 3600.0
STALE_ROOT_SWEEP_S = 2.0
LOCK = ".lock"
LOCK_ATTEMPTS = 20
log = logging.getLogger("toolwise.sandbox")


MAX_PENDING_PRINTS = 8
"""Printed texts that are kept until `on_print` is set."""


class Pool:
    """Lends each worker to one caller at a time."""

    def __init__(self, plan: Plan, *, workers: int, max_calls: int, timeout_s: float, require: bool) -> None:
        self._plan, self._max_calls, self._timeout_s, self._require = plan, max_calls, timeout_s, require
        self.workers = workers
        self._on_print: PrintCallback | None = None
        self._pending_prints: list[tuple[str, str]] = []
        self._print_lock = threading.Lock()
        self.left_running = 0
        """Number of processes that calls left running; they were killed."""
        self._reset()

    def _reset(self, *, closed: bool = False) -> None:
        self._slots = threading.BoundedSemaphore(self.workers)
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, list[Worker]] = OrderedDict()
        self._busy: set[Worker] = set()
        self._spare: Process | None = None
        self._root: Path | None = None
        self._lock_fd: int | None = None
        self._count = 0
        self.closed = closed
        """Once closed, workers die because we killed them, so calls are not retried."""
        self.pid = os.getpid()

    @contextmanager
    def worker(self, target: Target, *, fresh: bool = False) -> Iterator[Worker]:
        """Lend a worker that has loaded `target`. It is ended if the block raises or leaves it unclean.

        `fresh`: start a new one. An idle worker may have been killed or stopped in the meantime.
        """
        with self._slots:
            worker = (None if fresh else self._take_idle(target)) or self._new_worker(target, with_spare=not fresh)
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

    def _new_worker(self, target: Target, *, with_spare: bool = True) -> Worker:
        """Start a worker, from the spare process if there is one.

        A worker that dies or is stopped before it starts loading user code is replaced once: the function is not to
        blame.
        """
        try:
            return self._start_worker(target, self._take_spare(target) if with_spare else None)
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
        worker = Worker(process, plan, self._forward_print, target.reference)
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
            self._ensure_spare(target)
        return worker

    @property
    def on_print(self) -> PrintCallback | None:
        """Callback for what user code prints. Output from before it was set (on import) is delivered first."""
        return self._on_print

    @on_print.setter
    def on_print(self, on_print: PrintCallback | None) -> None:
        with self._print_lock:
            self._on_print = on_print
            pending, self._pending_prints = self._pending_prints, []
        for label, text in pending:
            self._forward_print(label, text)

    def _forward_print(self, label: str, text: str) -> None:
        with self._print_lock:
            on_print = self._on_print
            if on_print is None and len(self._pending_prints) < MAX_PENDING_PRINTS:
                self._pending_prints.append((label, text))
        if on_print is not None:
            on_print(label, text)

    def _fits(self, process: Process, target: Target) -> bool:
        """Whether a started process can serve `target`: in namespaces it sees the files of one function only."""
        if process.view is None:
            return True
        wanted = self._view(target, process.scratch)
        return wanted is not None and wanted.read == process.view.read

    def _ensure_spare(self, target: Target) -> None:
        """Start the next process while this worker is busy."""
        with self._lock:
            if self._spare is None and not self.closed:
                with suppress(SandboxError, RuntimeError):
                    self._spare = self._process(target)

    def _readable(self, target: Target) -> tuple[str, ...]:
        return (*readable_folders(), *target.read, *self._plan.read)

    def _view(self, target: Target, scratch: Path) -> MountView | None:
        file_mb = self._plan.file_mb if self._plan.own_disk else None
        return worker_view(self._plan.layers, self._readable(target), str(scratch), self._plan.permissions, file_mb)

    def _process(self, target: Target) -> Process:
        if self._root is None:
            self._root, self._lock_fd = make_root()
        self._count += 1
        scratch = self._root / str(self._count)
        scratch.mkdir(mode=0o700)
        return start_process(scratch, self._view(target, scratch), supervised=self._plan.may_have_children)

    def _put_back(self, target: Target, worker: Worker) -> None:
        if not worker.clean or worker.calls >= self._max_calls or self.closed:
            self._end(worker)
            return
        worker.load_deadline = 0.0
        surplus: list[Worker] = []
        with self._lock:
            self._busy.discard(worker)
            self._idle.setdefault(target.reference, []).append(worker)
            self._idle.move_to_end(target.reference)
            while sum(map(len, self._idle.values())) > self.workers:
                oldest = next(key for key, idle in self._idle.items() if idle)
                surplus.append(self._idle[oldest].pop(0))
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
        """The processes running now."""
        with self._lock:
            up = [*self._busy, *(worker for idle in self._idle.values() for worker in idle)]
            spare = [self._spare.pid] if self._spare is not None else []
            return [worker.process.pid for worker in up] + spare

    def close(self) -> None:
        """End every worker, even during a call; the caller then gets a `died` fault."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            idle = [worker for workers in self._idle.values() for worker in workers]
            spare, self._spare = self._spare, None
            self._idle.clear()
            busy = list(self._busy)
        for worker in busy:  # its caller's thread cleans up
            worker.process.kill()
        for worker in idle:
            worker.end()
        if spare is not None:
            spare.end(sweep=False)
        end = time.monotonic() + 2.0
        while self._busy and time.monotonic() < end:
            time.sleep(0.005)
        if self._root is not None:
            remove_root(self._root)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def abandon(self) -> None:
        """In a forked child: close our copies of the descriptors (the workers belong to the parent) and start empty."""
        idle = [worker for workers in self._idle.values() for worker in workers]
        for worker in [*idle, *self._busy]:
            worker.close_fds()
        if self._spare is not None:
            self._spare.close_fds()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
        self._reset(closed=self.closed)


def make_root() -> tuple[Path, int]:
    """Create a root for scratch folders, locked while this process lives. Removes the roots of dead processes first."""
    sweep_roots()
    for _ in range(LOCK_ATTEMPTS):
        root = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        try:
            lock_fd = _lock(root)
        except BlockingIOError:  # another process is sweeping it right now
            continue
        if (root / LOCK).exists():
            return root, lock_fd
        os.close(lock_fd)  # it was swept between mkdtemp and the lock
    raise SandboxError(f"{tempfile.gettempdir()}: other processes remove scratch folders as soon as they are created")


def _lock(root: Path) -> int:
    with closing_fd(os.open(root, FOLDER_FLAGS)) as folder:
        if os.fstat(folder).st_uid != os.geteuid():
            raise PermissionError(f"{root} belongs to another user")
        lock_fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner is alive
        os.close(lock_fd)
        raise
    return lock_fd


def sweep_roots() -> None:
    """Remove the roots of killed trainers, within `STALE_ROOT_SWEEP_S`."""
    end = time.monotonic() + STALE_ROOT_SWEEP_S
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = root.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if not (root / LOCK).exists() and time.time() - status.st_mtime < UNLOCKED_GRACE_S:
                continue  # its owner may be about to lock it
            lock_fd = _lock(root)
            try:
                remove_folder(root, max(end - time.monotonic(), 0.01))
            finally:
                os.close(lock_fd)
