"""A tool's worker process as the operating system sees it: in a session of its own, and ended with all in it."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from toolwise.references import WORKER
from toolwise.sandbox.layers.supervisor import SPARE
from toolwise.sandbox.processes import sweep_leftovers
from toolwise.sandbox.supervision import AVAILABLE
from toolwise.tools.isolation.places import Place

LARGEST_RESULT = 8 << 20

# A fresh interpreter, never a fork: the trainer has threads, and a fork would take their locks along.
_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from toolwise.sandbox.layers.supervisor import supervise; "
    "sys.platform == 'linux' and supervise(start['life']); "
    "from toolwise.tools.isolation.serving import main; main(start)"
)
MARK = "TOOLWISE_SANDBOX"
"""What sweep_leftovers looks for: a daemon inherits its environment."""
_DEFAULTS = {
    "PYTHONHASHSEED": "0",  # all workers order a set alike
    "OPENBLAS_NUM_THREADS": "1",  # numpy's import would start threads, and a process with threads cannot be forked
}


_closing = threading.Lock()


class Child(Protocol):
    """A process that stays known by its number until it is waited for."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int | None: ...


@dataclass(slots=True)
class Process:
    """A worker's supervisor, where the system has such (`sandbox/layers/supervisor.py`), or the worker itself."""

    popen: Child
    channel: socket.socket
    output: int
    life: int
    """The end of a pipe that nobody writes to: when it closes, the process and its group end."""
    mark: str

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        """With all that it started. Twice is as good as once, until it is waited for."""
        if AVAILABLE:
            for number in (signal.SIGCONT, signal.SIGTERM):  # before its life ends, which would mean that we are gone
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, number)
        self._close_life()
        if not AVAILABLE:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def spare_forked(self) -> None:
        """Workers that it forks may outlive it."""
        if AVAILABLE:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, SPARE)

    def sweep(self) -> None:
        """Ends what carries its mark, where its supervisor was killed. Before it is waited for: after that its number
        may be another's."""
        sweep_leftovers(self.pid, self.mark)

    def close_pipes(self) -> None:
        self._close_life()
        with suppress(OSError):
            os.close(self.output)

    def _close_life(self) -> None:
        with _closing:
            life, self.life = self.life, -1
        if life >= 0:
            os.close(life)


class Pipes:
    """What a worker and the trainer talk over: a channel, the pipe of its life and its output. As a context, `theirs`
    are closed at its end, and ours too unless `process` took them."""

    def __enter__(self) -> Pipes:
        self._kept = False
        with ExitStack() as undo:  # where descriptors run out halfway
            self._ours, self._theirs = socket.socketpair()
            undo.callback(self._theirs.close)
            undo.callback(self._ours.close)
            self._life_read, self._life_write = os.pipe()
            undo.callback(os.close, self._life_read)
            undo.callback(os.close, self._life_write)
            self._output_read, self._output_write = os.pipe()
            undo.pop_all()
        return self

    @property
    def theirs(self) -> tuple[int, int, int]:
        """The channel, the life and the output."""
        return self._theirs.fileno(), self._life_read, self._output_write

    def process(self, child: Child, mark: str) -> Process:
        self._ours.setblocking(False)
        os.set_blocking(self._output_read, False)
        self._kept = True
        return Process(child, self._ours, self._output_read, self._life_write, mark)

    def __exit__(self, *exc: object) -> None:
        self._theirs.close()
        os.close(self._life_read)
        os.close(self._output_write)
        if not self._kept:
            self._ours.close()
            os.close(self._life_write)
            os.close(self._output_read)


def start_process(place: Place) -> Process:
    """An interpreter that loads `place`; raises an `OSError` where none can be had."""
    if not sys.executable:
        raise OSError("this Python does not know its own program (sys.executable is empty)")
    mark = secrets.token_hex(16)
    with Pipes() as pipes:
        channel, life, output = pipes.theirs
        start = {
            "channel": channel,
            "life": life,
            "path": sys.path,
            "place": place.to_json(),
            "largest": LARGEST_RESULT,
        }
        popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(start)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**_DEFAULTS, **os.environ, WORKER: "1", MARK: mark},
            start_new_session=True,
            pass_fds=(channel, life),
        )
        return pipes.process(popen, mark)


class Death:
    """When a process ends, without waiting for it: until it is waited for, its number is its own."""

    def __init__(self, process: Process) -> None:
        self._popen = process.popen
        self.descriptor: int | None = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        self.tick_ms = None if self.descriptor is not None else 100
        self._poll = select.poll()
        if self.descriptor is not None:
            self._poll.register(self.descriptor, select.POLLIN)

    def came(self, within_s: float = 0.0) -> bool:
        if self.descriptor is not None:
            return bool(self._poll.poll(within_s * 1000))
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(within_s)
        return self._popen.poll() is not None

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


def how_it_ended(code: int | None) -> str:
    if code is None:
        return "never started"
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
