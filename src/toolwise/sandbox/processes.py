"""Starts worker processes and ends them together with everything they started, even if it tries to survive."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise.config.imports import WORKER_ENV_VAR
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.bubblewrap import INIT, BwrapProcess, MountView, bwrap_command
from toolwise.sandbox.layers.descriptors import closing_fd
from toolwise.sandbox.layers.process_info import is_stopped, list_pids, read_proc_stat
from toolwise.sandbox.scratch import remove_in_background
from toolwise.sandbox.supervisor_client import (
    SUPERVISION_AVAILABLE,
    ProcessHandle,
    ReportPipe,
    SupervisedProcess,
)
from toolwise.sandbox.targets import library_folders, package_folder

_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from toolwise.sandbox.layers.supervisor import start_supervisor; start_supervisor(start); "
    "from toolwise.sandbox.worker_main import main; main(start)"
)
MARK_VARIABLE = "TOOLWISE_SANDBOX"
"""Marks descendants for `sweep_leftovers`: even a daemon inherits the environment."""
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
_INT = struct.Struct("i")


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
    supervised_pid: int | None = None
    """Pid of the worker below a supervisor, once it has reported it."""

    @property
    def pid(self) -> int:
        return self.supervised_pid or self.popen.pid

    @property
    def leftover_count(self) -> int:
        """Number of processes it left running when it ended."""
        return (self.popen.leftover_count or 0) if isinstance(self.popen, SupervisedProcess) else 0

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


_spawner: ThreadPoolExecutor
"""Starts every process from one thread: the parent-death signal fires when the starting thread ends."""


def _make_spawner() -> None:
    global _spawner
    _spawner = ThreadPoolExecutor(1, thread_name_prefix="toolwise-sandbox-start")


_make_spawner()
os.register_at_fork(after_in_child=_make_spawner)  # the thread does not survive a fork


def start_process(scratch: Path, view: MountView | None = None, *, supervised: bool = False) -> Process:
    """Start a worker, in its own namespaces if there is a `view`.

    `supervised`: it may start processes, which must end with it.
    """
    require_interpreter()
    mark, keep = secrets.token_hex(16), library_folders()
    with ExitStack() as ours, ExitStack() as theirs:
        ends, (channel, liveness_fd, output) = open_pipes(ours, theirs)
        report = ReportPipe(ours, theirs) if supervised and SUPERVISION_AVAILABLE and view is None else None
        start = {
            "channel": channel,
            "life": liveness_fd,
            "parent": os.getpid() if view is None else INIT,
            "path": [*keep, str(package_folder().parent)],
            "keep": keep,
            "report": None if report is None else report.theirs,
        }
        try:
            popen = launch(
                [sys.executable, "-I", "-S", "-B", "-c", _BOOT, json.dumps(start)],
                _environment(scratch, mark),
                scratch,
                view=view,
                report=report,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(channel, liveness_fd, *([] if report is None else [report.theirs])),
            )
        except OSError as fault:
            raise SandboxError(f"cannot start a worker process: {fault}") from None
        ours.pop_all()
        return Process(popen, *ends, scratch, mark, view)


def open_pipes(ours: ExitStack, theirs: ExitStack) -> tuple[tuple[socket.socket, int, int], tuple[int, int, int]]:
    """The pipes between us and a new process: our channel, output and lifeline, and its channel, lifeline and output.

    The process ends when the lifeline closes, which is never written to. The stacks close the ends.
    """
    channel, child_channel = open_channel(ours, theirs)
    child_lifeline, lifeline = open_pipe(theirs, ours)
    output, child_output = open_pipe(ours, theirs)
    channel.setblocking(False)
    os.set_blocking(output, False)
    return (channel, output, lifeline), (child_channel, child_lifeline, child_output)


def open_channel(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, int]:
    """A socket pair whose ends are closed by the given stacks."""
    own_end, child_end = socket.socketpair()
    return ours.enter_context(own_end), theirs.enter_context(child_end).fileno()


def receive_descriptors(channel: socket.socket, max_bytes: int, count: int) -> tuple[bytes, list[int]]:
    """Data and the descriptors that come with it. Other processes started from here do not inherit these, which
    `recv_fds` cannot do."""
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, ancillary, _, _ = channel.recvmsg(max_bytes, socket.CMSG_LEN(count * _INT.size), flags)
    return data, [number for _, _, packed in ancillary for (number,) in _INT.iter_unpack(packed)]


def has_unread_bytes(channel: socket.socket) -> bool:
    """Whether the process has not yet read everything that was sent."""
    return any(fcntl.ioctl(channel, termios.TIOCOUTQ, bytes(4)))


def open_pipe(read_end: ExitStack, write_end: ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed by the given stacks."""
    read, write = os.pipe()
    read_end.callback(os.close, read)
    write_end.callback(os.close, write)
    return read, write


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
    settings: dict[str, Any] = {"env": environment, "cwd": folder, "start_new_session": True, **popen}
    if view is None:
        process = _spawner.submit(lambda: subprocess.Popen(command_line, **settings)).result()
        return process if report is None else SupervisedProcess(process, report)
    with ExitStack() as ours, ExitStack() as theirs:
        info_read, info_write = open_pipe(ours, theirs)
        settings["pass_fds"] = (*settings.get("pass_fds", ()), info_write)
        command_line = [*bwrap_command(view, info_write), *command_line]
        bwrap = _spawner.submit(lambda: subprocess.Popen(command_line, **settings)).result()
        theirs.close()
        return BwrapProcess(bwrap, info_read)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def program_environment(home: str, temporary: str, mark: str) -> dict[str, str]:
    """Environment of a program. A fixed hash seed gives sets the same order in every run."""
    return {**_environment(Path(home), mark), "TMPDIR": temporary, "PYTHONHASHSEED": "0"}


def require_interpreter() -> None:
    if not sys.executable:
        raise SandboxError("cannot start a sandbox: sys.executable is empty, so the Python interpreter is unknown")


def _environment(scratch: Path, mark: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    home = {"HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return {**passed, **home, **_LIBRARY_VARIABLES, WORKER_ENV_VAR: "1", MARK_VARIABLE: mark}


def sweep_leftovers(session: int, mark: str) -> None:
    """Kill whatever still runs in a session or carries its mark, an inherited environment variable.

    Used where no supervisor keeps track of the processes.
    """
    if sys.platform != "linux":
        return
    for _ in range(_SWEEPS):
        others = [pid for pid in sorted(list_pids(), reverse=True) if pid != os.getpid()]
        pids = [pid for pid in others if _belongs(pid, session, mark)]
        for pid in pids:
            _kill_checked(pid, session, mark)
        if not pids:
            return
        time.sleep(0.005)


def _belongs(pid: int, session: int, mark: str) -> bool:
    stat = read_proc_stat(pid)
    if stat.ended or stat.session == session:
        return not stat.ended
    with suppress(OSError):
        return f"{MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _kill_checked(pid: int, session: int, mark: str) -> None:
    """Kill through a pidfd and check again: the pid may have been reused."""
    with suppress(OSError), closing_fd(os.pidfd_open(pid)) as handle:
        if _belongs(pid, session, mark):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
