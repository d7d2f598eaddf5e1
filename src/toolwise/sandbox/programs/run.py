"""Runs one program written by a model and waits for it. Blocks; `program_sandbox.py` runs it in a thread."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from toolwise.sandbox.faults import MAX_MESSAGE_CHARS, SandboxError, WorkerFault, sanitize_text
from toolwise.sandbox.layers import seccomp
from toolwise.sandbox.layers.bubblewrap import MountView
from toolwise.sandbox.layers.hardening import MEBIBYTE, Plan
from toolwise.sandbox.process_limits import (
    CHECK_INTERVAL_S,
    MEASURE_INTERVAL_S,
    START_S,
    check_memory,
    check_process_count,
    check_threads,
)
from toolwise.sandbox.process_tree import SUPERVISION_AVAILABLE, SUPERVISOR_END_S, ProcessTree, ReportPipe
from toolwise.sandbox.processes import clean_environment, launch_isolated, open_pipe
from toolwise.sandbox.programs.fork_gate import ForkGate
from toolwise.sandbox.programs.output_capture import OutputCapture
from toolwise.sandbox.programs.work_folders import WorkDisk
from toolwise.serialization.json_text import load_json

Language = Literal["python", "shell"]
Kind = Literal["ok", "exit", "timeout", "memory", "denied", "died", "too_big"]
MAX_OUTPUT_BYTES = 16 * MEBIBYTE
MAX_STATUS_BYTES = 1 << 16
_REPORTED_KINDS: dict[str, Kind] = {"memory": "memory", "denied": "denied", "too_big": "too_big"}


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The outcome of a program. `stdout` and `stderr` keep their beginning and end; see `OutputCapture`."""

    kind: Kind
    message: str
    """One line for the author of the program; "" on success."""
    stdout: str = ""
    stderr: str = ""
    exit_status: int | None = None
    """As in a shell: 128 + n if signal n killed it; None if the sandbox ended it or nothing was run."""
    seconds: float = 0.0
    left_running: int = 0
    """Number of its processes that still ran when it ended; they were killed."""


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A program and the settings it runs with."""

    language: Language
    text: str
    plan: Plan
    view: MountView | None
    folders: tuple[Path, ...]
    """The working folder and the temporary folder."""
    timeout_s: float
    output_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False)
    """Held while the working folder is copied: other programs may be using it."""

    @property
    def needs_fork_approval(self) -> bool:
        return self.plan.may_have_children and seccomp.supported()


class StopSignal:
    """Stops a run from another thread."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._lock = threading.Lock()
        self._write: int | None = None

    def request_stop(self) -> None:
        with self._lock:
            self.stop_requested = True
            if self._write is not None:
                os.write(self._write, b"x")

    @contextmanager
    def wakeup_fd(self) -> Iterator[int]:
        """A descriptor that becomes readable on `request_stop`. Only for running programs: thousands may be queued."""
        read, write = os.pipe()
        with self._lock:
            self._write = write
        try:
            yield read
        finally:
            with self._lock:
                self._write = None
            os.close(read)
            os.close(write)


def run_program(spec: ProgramSpec, stop: StopSignal) -> ProgramResult | None:
    """Run a program. Returns None if it was stopped. Whatever happens, no process is left afterwards."""
    violation: WorkerFault | None = None
    with ExitStack() as closing:
        run = _Run(spec, stop, closing.enter_context(stop.wakeup_fd()), closing)
        try:
            run.watch()
        except WorkerFault as fault:
            violation = fault
        finally:
            code = run.popen.end(sweep=spec.plan.may_have_children)
        if stop.stop_requested:
            return None
        return run.result(violation, code)


class _Run:
    def __init__(self, spec: ProgramSpec, stop: StopSignal, stop_fd: int, closing: ExitStack) -> None:
        self._spec, self._stop, self._stop_fd = spec, stop, stop_fd
        self._started_at: float | None = None
        self._next_count = 0.0
        self._seconds = 0.0
        self._program_ended = False
        """Whether the program has ended on its own and its supervisor is killing leftovers."""
        with ExitStack() as theirs:
            out, out_write = open_pipe(closing, theirs)
            err, err_write = open_pipe(closing, theirs)
            status, status_write = open_pipe(closing, theirs)
            liveness_read, _ = open_pipe(theirs, closing)
            self._fork_gate = ForkGate(closing)
            self._disk = WorkDisk(spec.folders, spec.plan.file_mb, spec.lock, closing, theirs)
            fork_channel = self._fork_gate.open(theirs) if spec.needs_fork_approval else None
            self._out, self._err = OutputCapture(out, spec.output_bytes), OutputCapture(err, spec.output_bytes)
            self._status_output = OutputCapture(status, MAX_STATUS_BYTES)
            supervised = spec.plan.may_have_children and SUPERVISION_AVAILABLE
            self._report = ReportPipe(closing, theirs) if supervised else None
            child_fds = {
                "status": status_write,
                "life": liveness_read,
                "forks": fork_channel,
                "folders": self._disk.child_end,
            }
            self.popen = self._launch(out_write, err_write, child_fds)

    def _launch(self, out: int, err: int, child_fds: dict[str, int | None]) -> ProcessTree:
        spec = self._spec
        home, *temporary = spec.plan.folders
        order = {"plan": spec.plan.to_json(), "language": spec.language, "text": spec.text}
        with tempfile.TemporaryFile() as file:  # not a pipe: holds a program of any length without blocking
            file.write(json.dumps(order).encode())
            file.seek(0)
            return launch_isolated(
                "toolwise.sandbox.programs.program_main",
                {**child_fds, "order": file.fileno()},
                ["-s", "-P", "-S", "-B"],  # not -I, which would ignore PYTHONHASHSEED; the rest is our environment
                # A fixed hash seed gives sets the same order in every run.
                {**clean_environment(home, temporary[0] if temporary else home), "PYTHONHASHSEED": "0"},
                spec.folders[0],
                view=spec.view,
                report=self._report,
                stdout=out,
                stderr=err,
            )

    def watch(self) -> None:
        """Wait until it ends on its own. Raises a `WorkerFault` if it must be killed."""
        poll = select.poll()
        ended = _open_pidfd(self.popen.pid)
        pipes = [captured.descriptor for captured in (self._out, self._err, self._status_output)]
        reported = None if self._report is None else self._report.ours
        for descriptor in (*pipes, self._stop_fd, ended, reported):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        self._fork_gate.listen(poll)
        self._disk.listen(poll)
        try:
            self._watch(poll, ended)
        finally:
            self._seconds = self._seconds or self._elapsed_s()
            if ended is not None:
                os.close(ended)

    def _watch(self, poll: select.poll, ended: int | None) -> None:
        deadline = time.monotonic() + START_S
        next_check = time.monotonic() + MEASURE_INTERVAL_S  # a program can write as soon as it starts
        while True:
            now = time.monotonic()
            if now >= deadline and self._program_ended:
                return
            if now >= deadline:
                raise WorkerFault("timeout", f"it ran longer than {self._spec.timeout_s:g} s and was ended")
            if self._fork_gate.reached_limit:
                check_process_count(self.popen)
                self._fork_gate.forks_seen = 0
            if now >= next_check:
                cpu_before = time.thread_time()
                self._check_usage(now)
                # At most a tenth of a core, in CPU time: by wall time, a larger fork bomb would be checked less often.
                interval = CHECK_INTERVAL_S if self._disk.limited else MEASURE_INTERVAL_S
                next_check = time.monotonic() + max(interval, 10 * (time.thread_time() - cpu_before))
            events = poll.poll(max(min(deadline, next_check) - time.monotonic(), 0) * 1000)
            ready = [descriptor for descriptor, _ in events]
            if self._stop.stop_requested:
                return
            self._fork_gate.answer(events)
            if self._report is not None and not self._program_ended and self._report.ours in ready:
                self._program_ended, self._seconds, deadline = (
                    True,
                    self._elapsed_s(),
                    time.monotonic() + SUPERVISOR_END_S,
                )
                poll.unregister(self._report.ours)
                self._fork_gate.stop()
            self._disk.answer(ready, poll)
            if self._disk.full:
                raise WorkerFault("too_big", self._disk.full)
            for captured in (self._out, self._err, self._status_output):
                if captured.descriptor in ready and captured.read() is None:
                    poll.unregister(captured.descriptor)
            if self._out.total + self._err.total > MAX_OUTPUT_BYTES:
                raise WorkerFault("too_big", f"it printed more than {MAX_OUTPUT_BYTES // MEBIBYTE} MB and was ended")
            if self._started_at is None and self._status_output.total:  # hardening is done: the run time starts now
                self._started_at = time.monotonic()
                deadline = self._started_at + self._spec.timeout_s
            if ended in ready or (ended is None and self.popen.poll() is not None):
                return

    def _check_usage(self, now: float) -> None:
        if self._started_at is None:  # until it is hardened, its /proc may still show the whole machine
            return
        full = self._disk.overflow_reason(self._proc_folders)
        if full:
            raise WorkerFault("too_big", full)
        if self._program_ended or now < self._next_count:
            return
        self._next_count = now + CHECK_INTERVAL_S
        if self._spec.plan.may_have_children:
            check_memory(self.popen, self._spec.plan.memory_mb)
        check_threads(self._proc_folders())

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at if self._started_at is not None else 0.0

    def _proc_folders(self) -> Iterable[str]:
        if self._spec.plan.may_have_children or self._spec.view is not None:
            return self.popen.proc_folders()
        return [f"/proc/{self.popen.pid}"]

    def result(self, violation: WorkerFault | None, code: int) -> ProgramResult:
        """After it has ended: read what is left in the pipes and determine the outcome."""
        for captured in (self._out, self._err, self._status_output):
            captured.drain()
        out, err = self._out.text(), self._err.text()
        full = self._disk.save_files()
        if self._disk.full:  # it was never started
            return ProgramResult("too_big", full)
        # The first line was written before the program started; the program may have written the others.
        lines = map(load_json, self._status_output.text().splitlines())
        first, *later = [line if isinstance(line, dict) else {} for line in lines] or [{}]
        if first.get("missing") != {}:
            reason = first.get("missing") or " ".join(err.split())[:300] or (violation and violation.message)
            reason = reason or f"its process exited with status {code}"
            raise SandboxError(f"a program could not be started in its sandbox: {reason}")
        if violation is None and full:
            violation = WorkerFault("too_big", full)
        left_running = self.popen.leftover_count or 0
        if violation is not None:
            kind = cast(Kind, violation.kind)
            return ProgramResult(kind, violation.message, out, err, None, self._seconds, left_running)
        status = 128 - code if code < 0 else code
        kind, message = self._classify_exit(status, later[0] if later else {})
        return ProgramResult(kind, message, out, err, status, self._seconds, left_running)

    def _classify_exit(self, status: int, report: dict[str, Any]) -> tuple[Kind, str]:
        if status == 0:
            return "ok", ""
        kind = report.get("kind")
        if isinstance(kind, str) and kind in _REPORTED_KINDS:
            return _REPORTED_KINDS[kind], sanitize_text(report.get("message"), MAX_MESSAGE_CHARS) or kind
        if status - 128 not in set(signal.Signals):
            return "exit", f"it exited with status {status}"
        name = signal.Signals(status - 128).name
        by_signal: dict[str, tuple[Kind, str]] = {
            "SIGXCPU": ("timeout", "it used more CPU time than it has"),
            "SIGXFSZ": ("too_big", f"it wrote a file of more than {self._spec.plan.file_mb} MB"),
            "SIGSYS": ("denied", "it made a system call for a different CPU architecture"),
        }
        return by_signal.get(name, ("died", f"it was killed by {name}"))


def _open_pidfd(pid: int) -> int | None:
    """A pidfd, readable once the process has ended but before it is reaped; None if the platform has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
