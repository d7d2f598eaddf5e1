"""A tool's worker process at the operating system level: started in its own session, and killed with its children."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from toolwise.config.imports import WORKER_ENV_VAR
from toolwise.sandbox.layers.descriptors import wait_ready
from toolwise.sandbox.layers.supervisor import KEEP_SUPERVISORS_SIGNAL
from toolwise.sandbox.processes import MARK_VARIABLE, open_pipes, sweep_leftovers
from toolwise.sandbox.supervisor_client import SUPERVISION_AVAILABLE, ask_supervisor_to_end
from toolwise.tools.isolation.code_location import ModuleRef

if TYPE_CHECKING:
    from toolwise.tools.isolation.zygote import ForkedChild

MAX_RESULT_BYTES = 8 << 20

# A fresh interpreter, never a fork: the trainer has threads, and a fork would inherit their locks.
_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from toolwise.sandbox.layers.supervisor import supervise; "
    "sys.platform == 'linux' and supervise(start['life']); "
    "from toolwise.tools.isolation.worker_main import main; main(start)"
)
_DEFAULTS = {
    "PYTHONHASHSEED": "0",  # the same set order in all workers
    "OPENBLAS_NUM_THREADS": "1",  # numpy's import would start threads, and a process with threads cannot be forked
}
_closing = threading.Lock()


@dataclass(slots=True)
class Process:
    """A worker's supervisor if the system supports one (`sandbox/layers/supervisor.py`), else the worker itself."""

    popen: subprocess.Popen[bytes] | ForkedChild
    channel: socket.socket
    output: int
    lifeline: int
    """Write end of a pipe that is never written to: when it closes, the process and its group end."""
    mark: str

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        """Kill it with everything it started. Can be repeated until `wait`."""
        if SUPERVISION_AVAILABLE:
            ask_supervisor_to_end(self.pid)  # before the lifeline closes, which would mean that we died
        self._close_lifeline()
        if not SUPERVISION_AVAILABLE:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def detach_children(self) -> None:
        """Let workers that it forks outlive it."""
        if SUPERVISION_AVAILABLE:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, KEEP_SUPERVISORS_SIGNAL)

    def sweep(self) -> None:
        """Kill every process with its mark, in case its supervisor was killed. Call before `wait`: afterwards the pid
        may be reused."""
        sweep_leftovers(self.pid, self.mark)

    def close_pipes(self) -> None:
        self._close_lifeline()
        with suppress(OSError):
            os.close(self.output)

    def _close_lifeline(self) -> None:
        with _closing:
            lifeline, self.lifeline = self.lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)


def start_process(module_ref: ModuleRef) -> Process:
    """Start an interpreter that loads `module_ref`; raises `OSError` on failure."""
    if not sys.executable:
        raise OSError("sys.executable is empty, so no interpreter can be started")
    mark = secrets.token_hex(16)
    with ExitStack() as ours, ExitStack() as theirs:
        ends, (channel, lifeline, output) = open_pipes(ours, theirs)
        start = {
            "channel": channel,
            "life": lifeline,
            "path": sys.path,
            "place": asdict(module_ref),
            "largest": MAX_RESULT_BYTES,
        }
        popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(start)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**_DEFAULTS, **os.environ, WORKER_ENV_VAR: "1", MARK_VARIABLE: mark},
            start_new_session=True,
            pass_fds=(channel, lifeline),
        )
        ours.pop_all()
        return Process(popen, *ends, mark)


class ExitWatcher:
    """Detects the end of a process without reaping it, so that its pid is not reused."""

    def __init__(self, process: Process) -> None:
        self._popen = process.popen
        self.descriptor: int | None = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        self.tick_ms = None if self.descriptor is not None else 100

    def has_exited(self, within_s: float = 0.0) -> bool:
        if self.descriptor is not None:
            return wait_ready(self.descriptor, within_s)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(within_s)
        return self._popen.poll() is not None

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
