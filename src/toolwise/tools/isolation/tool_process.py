"""A tool's worker process: a fresh interpreter, or a fork of one that has already loaded the module.

The trainer itself is never forked, as it has threads. A zygote is a fresh interpreter that loads the module once and
waits; `forks.py` is its side. Its children are ready in milliseconds and share most of its memory, but have their own
pipes to the trainer and their own sessions.
"""

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
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from toolwise.sandbox import wire
from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.layers.kernel import closing_fd, is_stopped, wait_ready
from toolwise.sandbox.layers.supervisor import KEEP_SUPERVISORS_SIGNAL
from toolwise.sandbox.process_tree import (
    SUPERVISION_AVAILABLE,
    ProcessTree,
    ask_supervisor_to_end,
    sweep_leftovers,
)
from toolwise.sandbox.processes import WorkerPipes, launch, open_pipes, python_command
from toolwise.tools.isolation.code_location import ModuleRef

MAX_RESULT_BYTES = 8 << 20
CAN_FORK = sys.platform == "linux"
"""On other systems libraries do not survive a fork, and the exit of a grandchild cannot be watched."""
REPLY_TIMEOUT_S = 20.0
"""How long a fork may take on a busy machine."""
POLL_S = 0.2
_DEFAULTS = {
    "PYTHONHASHSEED": "0",  # the same set order in all workers
    "OPENBLAS_NUM_THREADS": "1",  # numpy's import would start threads, and a process with threads cannot be forked
    "PYTHONUNBUFFERED": "1",  # what a call prints without a line end is logged in its place
}


@dataclass(slots=True)
class ToolProcess(WorkerPipes):
    """A worker's supervisor if the system supports one (`sandbox/layers/supervisor.py`), else the worker itself."""

    popen: ProcessTree | ForkedChild
    exit_fd: int | None = None
    """A pidfd: shows that the process has ended without reaping it, so that its pid is not reused."""

    @property
    def pid(self) -> int:
        return self.popen.pid

    def watch_exit(self) -> None:
        if hasattr(os, "pidfd_open"):
            self.exit_fd = os.pidfd_open(self.pid)

    def has_exited(self, within_s: float = 0.0) -> bool:
        if self.exit_fd is not None:
            return wait_ready(self.exit_fd, within_s)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(within_s)
        return self.popen.returncode is not None

    def kill(self) -> None:
        """Kill it with everything it started. Can be repeated until `wait`."""
        if SUPERVISION_AVAILABLE:
            ask_supervisor_to_end(self.pid)  # before the lifeline closes, which would mean that we died
        self.close_lifeline()
        if not SUPERVISION_AVAILABLE:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def sweep(self) -> None:
        """Kill every process with its mark, in case its supervisor was killed. Call before `wait`: afterwards the pid
        may be reused."""
        sweep_leftovers(self.pid, self.popen.mark)


def start_tool_process(module_ref: ModuleRef) -> ToolProcess:
    """Start an interpreter that loads `module_ref`; raises `OSError` on failure."""
    options = {"place": asdict(module_ref), "largest": MAX_RESULT_BYTES}
    return start_supervised("toolwise.tools.isolation.tool_worker_main", options, {**_DEFAULTS, **os.environ})


def start_supervised(module: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> ToolProcess:
    """Start an interpreter that runs `main` of `module` with `options` and a channel to us, below a supervisor if the
    system supports one. Raises `OSError` on failure."""
    with ExitStack() as ours, ExitStack() as theirs:
        ends, (channel, lifeline, output) = open_pipes(ours, theirs)
        start = {
            "channel": channel,
            "life": lifeline,
            "supervised": SUPERVISION_AVAILABLE,
            "report": None,
            "path": sys.path,
            **options,
        }
        command_line = python_command(module, start)
        popen = launch(command_line, environment, stdout=output, stderr=output, pass_fds=(channel, lifeline))
        ours.pop_all()
        return ToolProcess(*ends, popen)


class Zygote:
    """The trainer's handle of a zygote. Requests may come from any thread, and run one at a time."""

    def __init__(self, process: ToolProcess, pid: int) -> None:
        self._process, self._pid = process, pid
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, KEEP_SUPERVISORS_SIGNAL)  # let workers that it forks outlive it
        self._lock = threading.Lock()
        self._frame_reader = wire.FrameReader(1 << 16)
        self.gone = False

    def fork(self) -> ToolProcess:
        """Fork a worker; raises `OSError` on failure."""
        mark = secrets.token_hex(16)
        with ExitStack() as ours, ExitStack() as theirs:
            ends, child_ends = open_pipes(ours, theirs)
            reply = self._request({"fork": mark}, child_ends)
            pid = reply.get("pid")
            if not isinstance(pid, int):
                if "refused" in reply:
                    raise OSError(reply["errno"], reply["refused"])
                raise OSError("the process that workers are forked from gave no answer")
            ours.pop_all()
            return ToolProcess(*ends, ForkedChild(self, pid, mark))

    def reap(self, pid: int) -> int | None:
        """Reap a dead child, which frees its pid, and return its exit code; None if the zygote does not know it."""
        with suppress(OSError):
            code = self._request({"reap": pid}).get("code")
            return code if isinstance(code, int) else None
        return None

    def _request(self, request: dict[str, object], descriptors: tuple[int, ...] = ()) -> dict[str, object]:
        with self._lock:
            if self.gone:
                raise OSError("the process that workers are forked from is gone")
            try:
                return self._exchange(json.dumps(request).encode(), descriptors)
            except (OSError, WorkerFault) as fault:
                self.gone = True  # a late answer would be taken for the next one: never use it again
                self._process.kill()
                raise OSError(f"the process that workers are forked from is gone: {fault}") from None

    def _exchange(self, payload: bytes, descriptors: tuple[int, ...]) -> dict[str, object]:
        channel = self._process.channel
        socket.send_fds(channel, [payload], list(descriptors))
        until = time.monotonic() + REPLY_TIMEOUT_S
        while (reply := self._frame_reader.next()) is None:
            if not wait_ready(channel.fileno(), POLL_S):
                if is_stopped(self._pid) or time.monotonic() > until:
                    raise TimeoutError("it was stopped or does not answer")
                continue
            data = channel.recv(1 << 16)
            if not data:
                raise ConnectionError("it closed its channel")
            self._frame_reader.feed(data)
        return dict(reply)


@dataclass(slots=True)
class ForkedChild:
    """Like `subprocess.Popen` for a child of the zygote. Its pid stays valid until it is reaped."""

    zygote: Zygote
    pid: int
    mark: str
    returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for it to exit, and let the zygote reap it."""
        if self.returncode is not None:
            return self.returncode
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            pass
        except OSError:  # no descriptors left
            return self._poll_until_reaped(timeout if timeout is not None else REPLY_TIMEOUT_S)
        else:
            with closing_fd(handle):
                wait_ready(handle, timeout)
        self.returncode = self.zygote.reap(self.pid)
        return self.returncode

    def _poll_until_reaped(self, timeout: float) -> int | None:
        until = time.monotonic() + timeout
        while not self.zygote.gone and time.monotonic() < until:
            self.returncode = self.zygote.reap(self.pid)
            if self.returncode is not None:
                break
            time.sleep(0.02)
        return self.returncode
