"""One run of one program that a model wrote, from its start to its last trace. Blocks; `programs.py` keeps it in a
thread."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolwise.sandbox.faults import MAX_MESSAGE_CHARS, SandboxError, sanitize_text
from toolwise.sandbox.layers import seccomp
from toolwise.sandbox.layers.bubblewrap import INIT, MountView
from toolwise.sandbox.layers.hardening import MEBIBYTE, Plan
from toolwise.sandbox.process_limits import TOO_MANY_THREADS, has_too_many_threads
from toolwise.sandbox.process_usage import (
    TOO_MANY_PROCESSES,
    find_usage_violation,
    has_too_many_processes,
    proc_folders_of,
)
from toolwise.sandbox.processes import end_tree, launch, program_environment, require_interpreter
from toolwise.sandbox.programs.fork_gate import ForkGate
from toolwise.sandbox.programs.output_capture import OutputCapture
from toolwise.sandbox.programs.work_disk import WorkDisk
from toolwise.sandbox.supervisor_client import (
    SUPERVISION_AVAILABLE,
    SUPERVISOR_END_S,
    ProcessHandle,
    ReportPipe,
    SupervisedProcess,
)
from toolwise.sandbox.targets import library_folders, package_folder

Language = Literal["python", "shell"]
Kind = Literal["ok", "exit", "timeout", "memory", "denied", "died", "too_big"]
START_S = 60.0
"""How long an interpreter may take to come up on a busy machine; the program has not begun by then."""
CHECK_INTERVAL_S = 0.1
MEASURE_INTERVAL_S = 0.01
"""How often a program's processes are looked at; and its folder, where it has to be measured."""
MAX_OUTPUT_BYTES = 16 * MEBIBYTE
MAX_STATUS_BYTES = 1 << 16
_REPORTED_KINDS: dict[str, Kind] = {"memory": "memory", "denied": "denied", "too_big": "too_big"}
_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from toolwise.sandbox.layers.supervisor import start_supervisor; start_supervisor(start); "
    "from toolwise.sandbox.programs.program_main import main; main(start)"
)


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What came of a program. `stdout` and `stderr` keep their beginning and end; see `OutputCapture`."""

    kind: Kind
    message: str
    """One line for whoever wrote the program; "" where it went well."""
    stdout: str = ""
    stderr: str = ""
    exit_status: int | None = None
    """As a shell has it: 128 + n where signal n ended it; None where the sandbox did, or nothing was run."""
    seconds: float = 0.0
    left_running: int = 0
    """Processes that it had started and that still ran when it ended; they were ended with it."""


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A program and the room that it runs in."""

    language: Language
    text: str
    plan: Plan
    view: MountView | None
    folders: tuple[Path, ...]
    """The working folder, and that for temporary files."""
    timeout_s: float
    output_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False)
    """Held while the working folder is copied: other programs may run in it."""

    @property
    def may_have_children(self) -> bool:
        return self.plan.may_have_children

    @property
    def needs_fork_approval(self) -> bool:
        return self.may_have_children and seccomp.supported()


class StopSignal:
    """Ends a run from another thread."""

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
        """A descriptor that is ready once it is asked. Only a run has one: those that wait may be thousands."""
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
    """None where it was stopped. Whatever happens, no process is left when this returns."""
    with ExitStack() as closing:
        run = _Run(spec, stop, closing.enter_context(stop.wakeup_fd()), closing)
        try:
            violation = run.watch()
        finally:
            code = end_tree(run.popen, run.mark, sweep=spec.may_have_children)
        if stop.stop_requested:
            return None
        return run.result(violation, code)


class _Run:
    def __init__(self, spec: ProgramSpec, stop: StopSignal, stop_fd: int, closing: ExitStack) -> None:
        require_interpreter()
        self._spec, self._stop, self._stop_fd = spec, stop, stop_fd
        self.mark = secrets.token_hex(16)
        self._started_at: float | None = None
        self._next_count = 0.0
        self._seconds = 0.0
        self._program_ended = False
        """Whether it has ended by itself, and its supervisor ends what it left."""
        with ExitStack() as theirs:
            out, out_write = _pipe(closing, theirs)
            err, err_write = _pipe(closing, theirs)
            told, told_write = _pipe(closing, theirs)
            life_read, _ = _pipe(theirs, closing)
            self._fork_gate = ForkGate(closing)
            self._disk = WorkDisk(spec.folders, spec.plan.file_mb, spec.lock, closing)
            asking = self._fork_gate.open(theirs) if spec.needs_fork_approval else None
            self._out, self._err = OutputCapture(out, spec.output_bytes), OutputCapture(err, spec.output_bytes)
            self._status_output = OutputCapture(told, MAX_STATUS_BYTES)
            self._report = ReportPipe() if spec.may_have_children and SUPERVISION_AVAILABLE else None
            if self._report is not None:
                closing.callback(self._report.close)
                theirs.callback(self._report.close_child_end)
            child_fds = {
                "told": told_write,
                "life": life_read,
                "births": asking,
                "report": None if self._report is None else self._report.theirs,
                "folders": self._disk.open(theirs),
            }
            self.popen = self._launch(out_write, err_write, child_fds)

    def _launch(self, out: int, err: int, child_fds: dict[str, int | None]) -> ProcessHandle:
        spec, keep = self._spec, library_folders()
        home, *more = spec.plan.scratch, *spec.plan.write
        start: dict[str, Any] = {
            **child_fds,
            "parent": os.getpid() if spec.view is None else INIT,
            "path": [*keep, str(package_folder().parent)],
            "keep": keep,
        }
        asked = {"plan": spec.plan.to_json(), "language": spec.language, "text": spec.text}
        with tempfile.TemporaryFile() as file:  # not a pipe: a program of any length is there at once
            file.write(json.dumps(asked).encode())
            file.seek(0)
            start["order"] = file.fileno()
            try:
                return launch(
                    # Not -I, which would ignore the hash seed; the rest of the environment is ours.
                    [sys.executable, "-s", "-P", "-S", "-B", "-c", _BOOT, json.dumps(start)],
                    program_environment(home, more[0] if more else home, self.mark),
                    spec.folders[0],
                    view=spec.view,
                    report=self._report,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    pass_fds=(file.fileno(), *(number for number in child_fds.values() if number is not None)),
                )
            except OSError as fault:
                raise SandboxError(f"no process can be started for a program: {fault}") from None

    def watch(self) -> tuple[Kind, str] | None:
        """Until it ends by itself, or must be ended: then the kind and the words for it."""
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
            return self._watch(poll, ended)
        finally:
            self._seconds = self._seconds or self._elapsed_s()
            if ended is not None:
                os.close(ended)

    def _watch(self, poll: select.poll, ended: int | None) -> tuple[Kind, str] | None:
        deadline, look = time.monotonic() + START_S, time.monotonic() + CHECK_INTERVAL_S
        while True:
            now = time.monotonic()
            if now >= deadline and self._program_ended:
                return None
            if now >= deadline:
                return "timeout", f"it ran longer than {self._spec.timeout_s:g} s and was ended"
            if self._fork_gate.reached_limit:
                if has_too_many_processes(self.popen, self.mark):
                    return "too_big", TOO_MANY_PROCESSES
                self._fork_gate.forks_seen = 0
            if now >= look:
                began = time.thread_time()
                violation = self._check_usage(now)
                if violation is not None:
                    return violation
                # A tenth of a core at most. Not of the time that passed: a bomb would be looked at less the more it is.
                every = CHECK_INTERVAL_S if self._disk.limited else MEASURE_INTERVAL_S
                look = time.monotonic() + max(every, 10 * (time.thread_time() - began))
            events = poll.poll(max(min(deadline, look) - time.monotonic(), 0) * 1000)
            ready = [found for found, _ in events]
            if self._stop.stop_requested:
                return None
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
                return "too_big", self._disk.full
            for captured in (self._out, self._err, self._status_output):
                if captured.descriptor in ready and captured.read() is None:
                    poll.unregister(captured.descriptor)
            if self._out.total + self._err.total > MAX_OUTPUT_BYTES:
                return "too_big", f"it printed more than {MAX_OUTPUT_BYTES // MEBIBYTE} MB and was ended"
            if self._started_at is None and self._status_output.total:  # it is hardened: the program's own time begins
                self._started_at = time.monotonic()
                deadline = self._started_at + self._spec.timeout_s
            if ended in ready or (ended is None and self.popen.poll() is not None):
                return None

    def _check_usage(self, now: float) -> tuple[Kind, str] | None:
        if self._started_at is None:  # what looks like its /proc may still be the whole machine's
            return None
        full = self._disk.overflow_reason(self._proc_folders)
        if full:
            return "too_big", full
        if self._program_ended:
            return None
        if now < self._next_count:
            return None
        self._next_count = now + CHECK_INTERVAL_S
        if has_too_many_threads(self.popen):
            return "too_big", TOO_MANY_THREADS
        if not self._spec.may_have_children:
            return None
        grown = find_usage_violation(self.popen, self.mark, self._spec.plan.memory_mb)
        return None if grown is None else (_REPORTED_KINDS[grown[0]], grown[1])

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at if self._started_at is not None else 0.0

    def _proc_folders(self) -> Iterable[str]:
        if self._spec.may_have_children or self._spec.view is not None:
            return proc_folders_of(self.popen, self.mark)
        return [f"/proc/{self.popen.pid}"]

    def result(self, violation: tuple[Kind, str] | None, code: int) -> ProgramResult:
        """After its end: what is still in the pipes, and what it came to."""
        for captured in (self._out, self._err, self._status_output):
            captured.drain()
        out, err = self._out.text(), self._err.text()
        full = self._disk.save_files()
        if self._disk.full:  # it was not begun
            return ProgramResult("too_big", full)
        # The first line was written before the program began; what follows may be anybody's word.
        first, *later = [_read_line(line) for line in self._status_output.text().splitlines()] or [{}]
        if first.get("missing") != {}:
            why = first.get("missing") or " ".join(err.split())[:300] or (violation and violation[1])
            why = why or f"its process ended with status {code}"
            raise SandboxError(f"a program could not be started in its sandbox: {why}")
        if violation is None and full:
            violation = "too_big", full
        if violation is not None:
            return ProgramResult(*violation, out, err, None, self._seconds, self._left_running())
        status = 128 - code if code < 0 else code
        kind, message = self._classify_exit(status, later[0] if later else {})
        return ProgramResult(kind, message, out, err, status, self._seconds, self._left_running())

    def _left_running(self) -> int:
        if isinstance(self.popen, SupervisedProcess):
            return self.popen.leftover_count or 0
        return (self._report.read_count() or 0) if self._report is not None else 0

    def _classify_exit(self, status: int, told: dict[str, Any]) -> tuple[Kind, str]:
        if status == 0:
            return "ok", ""
        kind = told.get("kind")
        if isinstance(kind, str) and kind in _REPORTED_KINDS:
            return _REPORTED_KINDS[kind], sanitize_text(told.get("message"), MAX_MESSAGE_CHARS) or kind
        if status - 128 not in set(signal.Signals):
            return "exit", f"it exited with status {status}"
        name = signal.Signals(status - 128).name
        by_signal: dict[str, tuple[Kind, str]] = {
            "SIGXCPU": ("timeout", "it used more CPU time than it has"),
            "SIGXFSZ": ("too_big", f"it wrote a file of more than {self._spec.plan.file_mb} MB"),
            "SIGSYS": ("denied", "it made a system call of another processor's"),
        }
        return by_signal.get(name, ("died", f"it was killed by {name}"))


def _pipe(read_end: ExitStack, write_end: ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with these."""
    read, write = os.pipe()
    read_end.callback(os.close, read)
    write_end.callback(os.close, write)
    return read, write


def _read_line(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that is ready once the process has ended, but is not yet forgotten; None where there are none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
