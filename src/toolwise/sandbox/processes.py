"""Starts the processes that run other people's code: reward workers, programs and tool workers."""

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
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise.config.imports import WORKER_ENV_VAR
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.bubblewrap import INIT, MountView, bwrap_command
from toolwise.sandbox.layers.kernel import is_stopped
from toolwise.sandbox.process_tree import (
    MARK_VARIABLE,
    SUPERVISION_AVAILABLE,
    NamespacedTree,
    ProcessTree,
    ReportPipe,
    SupervisedTree,
)
from toolwise.sandbox.scratch import remove_in_background
from toolwise.sandbox.targets import library_folders, package_folder

_CLUSTER_SECRETS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Whoever has the cluster's token runs code on all of its nodes."""
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
_INT = struct.Struct("i")
_closing = threading.Lock()


@dataclass(slots=True)
class WorkerPipes:
    """Our ends of the pipes to a worker process."""

    channel: socket.socket
    output: int
    lifeline: int
    """Write end of a pipe that is never written to: when it closes, the process ends."""

    def close_lifeline(self) -> None:
        with _closing:
            lifeline, self.lifeline = self.lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)

    def close_pipes(self) -> None:
        self.close_lifeline()
        with suppress(OSError):
            os.close(self.output)

    def close_fds(self) -> None:
        """Close our descriptors but leave the process alone: after a fork it belongs to the parent."""
        self.channel.close()
        self.close_pipes()


@dataclass(slots=True)
class Process(WorkerPipes):
    """The operating-system process of a reward's worker."""

    popen: ProcessTree
    scratch: Path
    view: MountView | None = None
    """Its file system view, if it runs in its own namespaces."""
    supervised_pid: int | None = None
    """Pid of the worker below a supervisor, once it has reported it."""

    @property
    def pid(self) -> int:
        return self.supervised_pid or self.popen.pid

    @property
    def worker(self) -> int:
        """Pid of the worker itself, also in namespaces; 0 if unknown."""
        return self.popen.first() if isinstance(self.popen, NamespacedTree) else self.pid

    def is_stopped(self) -> bool:
        """Whether it, or a process it needs to start up, was stopped (SIGSTOP)."""
        return any(map(is_stopped, (*self.popen.own_pids(), self.worker)))

    def threads(self) -> int | None:
        """Number of threads as reported by the kernel, not by the worker; None if unknown."""
        with suppress(OSError):
            return len(os.listdir(f"/proc/{self.worker}/task"))
        return None

    def close_fds(self) -> None:
        WorkerPipes.close_fds(self)
        self.popen.close_fds()

    def end(self, *, sweep: bool) -> int:
        """Kill it and everything it started, and remove its folder. Returns the exit code."""
        self.close_lifeline()
        code = self.popen.end(sweep=sweep)
        self.close_fds()
        remove_in_background(self.scratch)  # the caller need not wait until a hostile folder is removed
        return code


_spawner: ThreadPoolExecutor
"""Starts every process from one thread: the parent-death signal fires when the starting thread ends."""


def _make_spawner() -> None:
    global _spawner
    _spawner = ThreadPoolExecutor(1, thread_name_prefix="toolwise-sandbox-start")


_make_spawner()
os.register_at_fork(after_in_child=_make_spawner)  # the thread does not survive a fork


def start_process(scratch: Path, view: MountView | None = None, *, supervised: bool = False) -> Process:
    """Start a reward's worker, in its own namespaces if there is a `view`.

    `supervised`: it may start processes, which must end with it.
    """
    with ExitStack() as ours, ExitStack() as theirs:
        ends, (channel, lifeline, output) = open_pipes(ours, theirs)
        popen = launch_isolated(
            "toolwise.sandbox.worker_main",
            {"channel": channel, "life": lifeline},
            ["-I", "-S", "-B"],
            clean_environment(scratch, scratch),
            scratch,
            view=view,
            report=ReportPipe(ours, theirs) if supervised and SUPERVISION_AVAILABLE and view is None else None,
            stdout=output,
            stderr=output,
        )
        ours.pop_all()
        return Process(*ends, popen, scratch, view)


def launch_isolated(
    main: str,
    descriptors: Mapping[str, int | None],
    flags: Iterable[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    view: MountView | None,
    report: ReportPipe | None,
    **popen: Any,
) -> ProcessTree:
    """Start `main` of a module that hardens itself; its path has the installed packages only.

    `descriptors` are passed on, by name, and so is `report`, if a supervisor is to be above it.
    """
    keep = library_folders()
    passed = {**descriptors, "report": None if report is None else report.theirs}
    start = {
        **passed,
        "supervised": report is not None,
        "parent": os.getpid() if view is None else INIT,
        "path": [*keep, str(package_folder().parent)],
        "keep": keep,
    }
    pass_fds = tuple(number for number in passed.values() if number is not None)
    try:
        command_line = python_command(main, start, flags)
        return launch(command_line, environment, folder, view=view, report=report, pass_fds=pass_fds, **popen)
    except OSError as fault:
        raise SandboxError(f"cannot start a process in a sandbox: {fault}") from None


def python_command(main: str, start: Mapping[str, Any], flags: Iterable[str] = ()) -> list[str]:
    """Calls `main` of a module with `start`, in a fresh interpreter, below a supervisor if `start` says so.

    Never in a fork of this process: it has threads, and a fork would inherit their locks.
    """
    if not sys.executable:
        raise OSError("sys.executable is empty, so the Python interpreter is unknown")
    boot = (
        "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
        "from toolwise.sandbox.layers.supervisor import start_supervisor; start_supervisor(start); "
        f"from {main} import main; main(start)"
    )
    return [sys.executable, *flags, "-c", boot, json.dumps(start)]


def launch(
    command_line: list[str],
    environment: Mapping[str, str],
    folder: Path | None = None,
    *,
    view: MountView | None = None,
    report: ReportPipe | None = None,
    pass_fds: tuple[int, ...] = (),
    **popen: Any,
) -> ProcessTree:
    """Start a program in its own session, from the spawner thread.

    `report`: the pipe of the supervisor that the program puts above itself. The cluster's token is never passed on.
    """
    environment = {name: value for name, value in environment.items() if name not in _CLUSTER_SECRETS}
    mark = secrets.token_hex(16)
    settings: dict[str, Any] = {
        "env": {**environment, WORKER_ENV_VAR: "1", MARK_VARIABLE: mark},
        "cwd": folder,
        "stdin": subprocess.DEVNULL,
        "start_new_session": True,
        **popen,
    }

    def spawn(command_line: list[str], *info: int) -> subprocess.Popen[bytes]:
        try:
            settings["pass_fds"] = (*pass_fds, *info)
            return _spawner.submit(lambda: subprocess.Popen(command_line, **settings)).result()
        except RuntimeError as fault:  # this interpreter is exiting
            raise OSError(str(fault)) from None

    if view is None:
        return (ProcessTree if report is None else SupervisedTree)(spawn(command_line), mark, report)
    with ExitStack() as ours, ExitStack() as theirs:
        info_read, info_write = open_pipe(ours, theirs)
        bwrap = spawn([*bwrap_command(view, info_write), *command_line], info_write)
        theirs.close()
        return NamespacedTree(bwrap, mark, report, info_read)


def clean_environment(home: Path | str, temporary: Path | str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    own = {"HOME": str(home), "TMPDIR": str(temporary), "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return {**passed, **own, **_LIBRARY_VARIABLES}


def open_pipes(ours: ExitStack, theirs: ExitStack) -> tuple[tuple[socket.socket, int, int], tuple[int, int, int]]:
    """The pipes between us and a new process: our channel, output and lifeline, and its channel, lifeline and output.

    The stacks close the ends.
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


def open_pipe(read_end: ExitStack, write_end: ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed by the given stacks."""
    read, write = os.pipe()
    read_end.callback(os.close, read)
    write_end.callback(os.close, write)
    return read, write


def receive_descriptors(channel: socket.socket, max_bytes: int, count: int) -> tuple[bytes, list[int]]:
    """Data and the descriptors that come with it. Other processes started from here do not inherit these, which
    `recv_fds` cannot do."""
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, ancillary, _, _ = channel.recvmsg(max_bytes, socket.CMSG_LEN(count * _INT.size), flags)
    return data, [number for _, _, packed in ancillary for (number,) in _INT.iter_unpack(packed)]


def has_unread_bytes(channel: socket.socket) -> bool:
    """Whether the process has not yet read everything that was sent."""
    return any(fcntl.ioctl(channel, termios.TIOCOUTQ, bytes(4)))


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
