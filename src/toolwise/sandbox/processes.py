"""Starting a worker process and ending it, with everything that it started, however it tries to stay."""

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
    # Libraries that would start threads of their own: a worker with threads left behind is replaced.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # One heap for all threads: each further one takes 64 MB of address space, which is limited.
    "MALLOC_ARENA_MAX": "1",
    # Looking for plugins takes a fifth of a worker's start.
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
}
_SWEEPS = 40
T = TypeVar("T")


@dataclass(slots=True)
class Process:
    """A worker as the operating system sees it."""

    popen: ProcessHandle
    channel: socket.socket
    output: int
    lifeline_fd: int
    scratch: Path
    mark: str
    view: MountView | None = None
    """What it sees, where it is in namespaces of its own."""
    owner: int = field(default_factory=os.getpid)
    supervised_pid: int | None = None
    """The worker beneath a supervisor, once it has said its number."""

    @property
    def pid(self) -> int:
        return self.supervised_pid or self.popen.pid

    @property
    def leftover_count(self) -> int:
        """How many processes it had left running when it ended."""
        return (self.popen.leftover_count or 0) if isinstance(self.popen, SupervisedProcess) else 0

    def is_unusable(self) -> bool:
        """Whether it has ended, or somebody has stopped it, while it waited."""
        return self.popen.poll() is not None or self.is_stopped()

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it, or one that it needs to come up."""
        inside = [self.popen.init or 0] if isinstance(self.popen, BwrapProcess) else []
        return any(is_stopped(pid) for pid in (self.popen.pid, self.worker, *inside))

    def kill(self) -> None:
        """At once and without waiting: what is left of it is removed by `end`."""
        if isinstance(self.popen, SupervisedProcess):
            self.popen.ask_to_end()
        elif self.popen.returncode is None:
            with suppress(OSError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    @property
    def worker(self) -> int:
        """The worker itself, in namespaces too; 0 where it is not known."""
        return (self.popen.first() or 0) if isinstance(self.popen, BwrapProcess) else self.pid

    def threads(self) -> int | None:
        """How many threads it has, from the kernel and not from itself; None where the kernel does not say."""
        try:
            return len(os.listdir(f"/proc/{self.worker}/task"))
        except OSError:
            return None

    def close_fds(self) -> None:
        """Lets go of the descriptors without touching the process: it is another's."""
        self.channel.close()
        if isinstance(self.popen, BwrapProcess | SupervisedProcess):
            self.popen.close_fds()
        for descriptor in (self.output, self.lifeline_fd):
            with suppress(OSError):
                os.close(descriptor)

    def end(self, *, sweep: bool) -> int:
        """Kills it and what it started; removes its folder. Returns how it ended."""
        lifeline_fd, self.lifeline_fd = self.lifeline_fd, -1
        with suppress(OSError):
            os.close(lifeline_fd)
        code = end_tree(self.popen, self.mark, sweep=sweep)
        self.close_fds()
        remove_in_background(self.scratch)  # whoever waits for a result need not wait for a hostile folder's end
        return code


def end_tree(popen: ProcessHandle, mark: str, *, sweep: bool) -> int:
    """Kills a process and what it started, and waits until they are gone. Returns how it ended."""
    if isinstance(popen, SupervisedProcess):
        code = popen.end()
        if popen.leftover_count is None:  # it was killed itself, and its orphans are anybody's
            sweep_leftovers(popen.pid, mark)
        return code
    if popen.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(popen.pid, signal.SIGKILL)
    if isinstance(popen, BwrapProcess):
        popen.kill()
    elif sweep:  # before it is waited for: until then its number, and so its session's, is nobody else's
        sweep_leftovers(popen.pid, mark)
    return popen.wait()


class _Spawner:
    """One thread that starts every process: the kernel ends a process with the thread that started it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def run(self, start: Callable[[], T]) -> T:
        if self._pid != os.getpid():  # first use, or after a fork, where neither the thread nor the lock survived
            self._lock, self._pid, self._pool = threading.Lock(), os.getpid(), None
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="toolwise-sandbox-start")
            started = self._pool.submit(start)
        return started.result()


_spawner = _Spawner()


def start_process(scratch: Path, view: MountView | None = None, *, supervised: bool = False) -> Process:
    """A worker, in namespaces of its own where there is a `view`. `supervised`: it may start processes, which are to
    end with it."""
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
    """Starts a program, from the one thread that starts all; `pass_fds` and the like are Popen's. `report`: of the
    supervisor that it puts above itself."""
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
        plain = subprocess.Popen(command_line, **settings)
        return plain if report is None else SupervisedProcess(plain, report)
    info, theirs = os.pipe()
    settings["pass_fds"] = (*settings.get("pass_fds", ()), theirs)
    try:
        started = subprocess.Popen([*bwrap_command(view, theirs), *command_line], **settings)
    except BaseException:
        os.close(info)
        raise
    finally:
        os.close(theirs)
    try:
        return BwrapProcess(started, info)
    finally:
        os.close(info)


def _start(scratch: Path, view: MountView | None, report: ReportPipe | None) -> Process:
    require_interpreter()
    mark = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    life_read, life_write = os.pipe()
    output_read, output_write = os.pipe()
    keep = library_folders()
    start = {
        "channel": theirs.fileno(),
        "life": life_read,
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
            pass_fds=(theirs.fileno(), life_read, *([] if report is None else [report.theirs])),
            report=report,
        )
    except OSError as fault:
        ours.close()
        os.close(life_write)
        os.close(output_read)
        raise SandboxError(f"no worker process can be started: {fault}") from None
    finally:
        theirs.close()
        os.close(life_read)
        os.close(output_write)
    ours.setblocking(False)
    os.set_blocking(output_read, False)
    return Process(popen, ours, output_read, life_write, scratch, mark, view)


def program_environment(home: str, temporary: str, mark: str) -> dict[str, str]:
    """A worker's environment for a program, with the same order of sets and the like in every run of it."""
    return {**_environment(Path(home), mark), "TMPDIR": temporary, "PYTHONHASHSEED": "0"}


def require_interpreter() -> None:
    if not sys.executable:
        raise SandboxError("this Python does not know its own program (sys.executable is empty): no sandbox")


def _environment(scratch: Path, mark: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    home = {"HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return {**passed, **home, **_LIBRARY_VARIABLES, WORKER_ENV_VAR: "1", _MARK_VARIABLE: mark}


def sweep_leftovers(session: int, mark: str) -> None:
    """Ends whatever still runs in a session or carries its mark: a process inherits its environment. Where there is no
    supervisor that would know of it."""
    if sys.platform != "linux":
        return
    for _ in range(_SWEEPS):
        found = [pid for pid in _other_pids() if _belongs(pid, session, mark)]
        for pid in found:
            _kill_checked(pid, session, mark)
        if not found:
            return
        time.sleep(0.005)


def _other_pids() -> list[int]:
    found = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted((pid for pid in found if pid != os.getpid()), reverse=True)


def _belongs(pid: int, session: int, mark: str) -> bool:
    try:
        state, _, sid, _ = read_proc_stat(pid)
        if state in (b"Z", b"X"):
            return False
        return sid == session or f"{_MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ValueError, IndexError):
        return False


def start_ticks(pid: int) -> int:
    """In the kernel's ticks; 0 where it is gone."""
    try:
        return read_proc_stat(pid)[3]
    except (OSError, ValueError, IndexError):
        return 0


def _kill_checked(pid: int, session: int, mark: str) -> None:
    """Through a descriptor that stands for this very process: its number may be another's by now."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _belongs(pid, session, mark):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
