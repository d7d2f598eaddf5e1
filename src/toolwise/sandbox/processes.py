"""Starts worker processes and ends them together with everything they started, even if it tries to survive."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from toolwise.config.imports import WORKER_ENV_VAR
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.bubblewrap import INIT, BwrapProcess, MountView, bwrap_command
from toolwise.sandbox.scratch import remove_in_background
from toolwise.sandbox.supervisor_client import (
    SUPERVISION_AVAILABLE,
    ProcessHandle,
    ReportPipe,
    SupervisedProcess,
    is_stopped,
    read_proc_stat,
)
from toolwise.sandbox.targets import library_folders, package_folder

_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from toolwise.sandbox.layers.supervisor import start_supervisor; start_supervisor(start); "
    "from toolwise.sandbox.worker_main import main; main(start)"
)
_MARK_VARIABLE = "TOOLWISE_SANDBOX"
_INHERITED_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
_LIBRARY_VARIABLES = {
    # Libraries that start their own threads: a worker with leftover threads is replaced.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # One heap for all threads: each additional one takes 64 MB of address space, which is limited.
    "MALLOC_ARENA_MAX": "1",
    # Plugin discovery takes a fifth of a worker's start-up time.
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
}
_SWEEPS = 40
T = TypeVar("T")


@dataclass(slots=True)
class Process:
    """The operating-system process of a worker."""

    popen: ProcessHandle
    channel: socket.socket
    output: int
    liveness_fd: int
    scratch: Path
    mark: str
    view: MountView | None = None
    """Its file system view, if it runs in its own namespaces."""
    owner: int = field(default_factory=os.getpid)
    supervised_pid: int | None = None
    """Pid of the worker below a supervisor, once it has reported it."""

    @property
    def pid(self) -> int:
        return self.supervised_pid or self.popen.pid

    @property
    def leftover_count(self) -> int:
        """Number of processes it left running when it ended."""
        return (self.popen.leftover_count or 0) if isinstance(self.popen, SupervisedProcess) else 0

    def is_unusable(self) -> bool:
        """Whether it has ended or was stopped (SIGSTOP) while it was idle."""
        return self.popen.poll() is not None or self.is_stopped()

    def is_stopped(self) -> bool:
        """Whether it, or a process it needs to start up, was stopped (SIGSTOP)."""
        inside = [self.popen.init or 0] if isinstance(self.popen, BwrapProcess) else []
        return any(is_stopped(pid) for pid in (self.popen.pid, self.worker, *inside))

    def kill(self) -> None:
        """Kill it without waiting; `end` cleans up."""
        if isinstance(self.popen, SupervisedProcess):
            self.popen.ask_to_end()
        elif self.popen.returncode is None:
            with suppress(OSError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    @property
    def worker(self) -> int:
        """Pid of the worker itself, also in namespaces; 0 if unknown."""
        return (self.popen.first() or 0) if isinstance(self.popen, BwrapProcess) else self.pid

    def threads(self) -> int | None:
        """Number of threads as reported by the kernel, not by the worker; None if unknown."""
        try:
            return len(os.listdir(f"/proc/{self.worker}/task"))
        except OSError:
            return None

    def close_fds(self) -> None:
        """Close our descriptors but leave the process alone: after a fork it belongs to the parent."""
        self.channel.close()
        if isinstance(self.popen, BwrapProcess | SupervisedProcess):
            self.popen.close_fds()
        for descriptor in (self.output, self.liveness_fd):
            with suppress(OSError):
                os.close(descriptor)

    def end(self, *, sweep: bool) -> int:
        """Kill it and everything it started, and remove its folder. Returns the exit code."""
        liveness_fd, self.liveness_fd = self.liveness_fd, -1
        with suppress(OSError):
            os.close(liveness_fd)
        code = end_tree(self.popen, self.mark, sweep=sweep)
        self.close_fds()
        remove_in_background(self.scratch)  # the caller need not wait until a hostile folder is removed
        return code


def end_tree(popen: ProcessHandle, mark: str, *, sweep: bool) -> int:
    """Kill a process and everything it started, and wait until they are gone. Returns the exit code."""
    if isinstance(popen, SupervisedProcess):
        code = popen.end()
        if popen.leftover_count is None:  # the supervisor itself was killed, so its orphans are no longer below it
            sweep_leftovers(popen.pid, mark)
        return code
    if popen.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(popen.pid, signal.SIGKILL)
    if isinstance(popen, BwrapProcess):
        popen.kill()
    elif sweep:  # before wait(): until then its pid, and so its session id, cannot be reused
        sweep_leftovers(popen.pid, mark)
    return popen.wait()


class _Spawner:
    """Starts every process from one thread: the parent-death signal fires when the starting thread ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def run(self, start: Callable[[], T]) -> T:
        if self._pid != os.getpid():  # first use, or a forked child, where neither the thread nor the lock survives
            self._lock, self._pid, self._pool = threading.Lock(), os.getpid(), None
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="toolwise-sandbox-start")
            started = self._pool.submit(start)
        return started.result()


_spawner = _Spawner()


def start_process(scratch: Path, view: MountView | None = None, *, supervised: bool = False) -> Process:
    """Start a worker, in its own namespaces if there is a `view`.

    `supervised`: it may start processes, which must end with it.
    """
    report = ReportPipe() if supervised and SUPERVISION_AVAILABLE and view is None else None
    try:
        return _spawner.run(lambda: _start(scratch, view, report))
    except BaseException:
        if report is not None:
            report.close()
        raise
    finally:
        if report is not None:
            report.close_child_end()


def launch(
    command_line: list[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    view: MountView | None,
    report: ReportPipe | None = None,
    **popen: Any,
) -> ProcessHandle:
    """Start a program from the spawner thread; `pass_fds` and other options go to Popen.

    `report`: the pipe of the supervisor that the program puts above itself.
    """
    return _spawner.run(lambda: _launch(command_line, environment, folder, view, report, **popen))


def _launch(
    command_line: list[str],
    environment: Mapping[str, str],
    folder: Path,
    view: MountView | None,
    report: ReportPipe | None,
    **popen: Any,
) -> ProcessHandle:
    settings: dict[str, Any] = {"env": environment, "cwd": folder, "start_new_session": True, **popen}
    if view is None:
        process = subprocess.Popen(command_line, **settings)
        return process if report is None else SupervisedProcess(process, report)
    info_read, info_write = os.pipe()
    settings["pass_fds"] = (*settings.get("pass_fds", ()), info_write)
    try:
        bwrap = subprocess.Popen([*bwrap_command(view, info_write), *command_line], **settings)
    except BaseException:
        os.close(info_read)
        raise
    finally:
        os.close(info_write)
    try:
        return BwrapProcess(bwrap, info_read)
    finally:
        os.close(info_read)


def _start(scratch: Path, view: MountView | None, report: ReportPipe | None) -> Process:
    require_interpreter()
    mark = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    liveness_read, liveness_write = os.pipe()
    output_read, output_write = os.pipe()
    keep = library_folders()
    start = {
        "channel": theirs.fileno(),
        "life": liveness_read,
        "parent": os.getpid() if view is None else INIT,
        "path": [*keep, str(package_folder().parent)],
        "keep": keep,
        "report": None if report is None else report.theirs,
    }
    try:
        popen = _launch(
            [sys.executable, "-I", "-S", "-B", "-c", _BOOT, json.dumps(start)],
            _environment(scratch, mark),
            scratch,
            view,
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            pass_fds=(theirs.fileno(), liveness_read, *([] if report is None else [report.theirs])),
            report=report,
        )
    except OSError as fault:
        ours.close()
        os.close(liveness_write)
        os.close(output_read)
        raise SandboxError(f"cannot start a worker process: {fault}") from None
    finally:
        theirs.close()
        os.close(liveness_read)
        os.close(output_write)
    ours.setblocking(False)
    os.set_blocking(output_read, False)
    return Process(popen, ours, output_read, liveness_write, scratch, mark, view)


def program_environment(home: str, temporary: str, mark: str) -> dict[str, str]:
    """Environment of a program. A fixed hash seed gives sets the same order in every run."""
    return {**_environment(Path(home), mark), "TMPDIR": temporary, "PYTHONHASHSEED": "0"}


def require_interpreter() -> None:
    if not sys.executable:
        raise SandboxError("cannot start a sandbox: sys.executable is empty, so the Python interpreter is unknown")


def _environment(scratch: Path, mark: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    home = {"HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return {**passed, **home, **_LIBRARY_VARIABLES, WORKER_ENV_VAR: "1", _MARK_VARIABLE: mark}


def sweep_leftovers(session: int, mark: str) -> None:
    """Kill whatever still runs in a session or carries its mark, an inherited environment variable.

    Used where no supervisor keeps track of the processes.
    """
    if sys.platform != "linux":
        return
    for _ in range(_SWEEPS):
        pids = [pid for pid in _other_pids() if _belongs(pid, session, mark)]
        for pid in pids:
            _kill_checked(pid, session, mark)
        if not pids:
            return
        time.sleep(0.005)


def _other_pids() -> list[int]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted((pid for pid in pids if pid != os.getpid()), reverse=True)


def _belongs(pid: int, session: int, mark: str) -> bool:
    try:
        state, _, sid, _ = read_proc_stat(pid)
        if state in (b"Z", b"X"):
            return False
        return sid == session or f"{_MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ValueError, IndexError):
        return False


def start_ticks(pid: int) -> int:
    """Start time of a process in kernel clock ticks; 0 if it is gone."""
    try:
        return read_proc_stat(pid)[3]
    except (OSError, ValueError, IndexError):
        return 0


def _kill_checked(pid: int, session: int, mark: str) -> None:
    """Kill through a pidfd and check again: the pid may have been reused."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _belongs(pid, session, mark):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
