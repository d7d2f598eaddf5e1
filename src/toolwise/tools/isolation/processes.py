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
from contextlib import suppress
from dataclasses import dataclass

from toolwise.references import WORKER
from toolwise.sandbox.processes import sweep_leftovers
from toolwise.tools.isolation.places import Place

LARGEST_RESULT = 8 << 20

# A fresh interpreter, never a fork: the trainer has threads, and a fork would take their locks along.
_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from toolwise.tools.isolation.serving import main; main(start)"
)
_MARK = "TOOLWISE_SANDBOX"  # what sweep_leftovers looks for: a daemon inherits its environment


@dataclass(slots=True)
class Process:
    popen: subprocess.Popen[bytes]
    channel: socket.socket
    output: int
    life: int
    """The end of a pipe that nobody writes to: when it closes, the process and its group end."""
    mark: str

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def sweep(self) -> None:
        """Ends what it started in other groups. Before it is waited for: after that its number may be another's."""
        sweep_leftovers(self.pid, self.mark)

    def close_pipes(self) -> None:
        for descriptor in (self.output, self.life):
            with suppress(OSError):
                os.close(descriptor)


def start_process(place: Place) -> Process:
    """An interpreter that loads `place`; raises an `OSError` where none can be had."""
    if not sys.executable:
        raise OSError("this Python does not know its own program (sys.executable is empty)")
    mark = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    life_read, life_write = os.pipe()
    output_read, output_write = os.pipe()
    start = {
        "channel": theirs.fileno(),
        "life": life_read,
        "path": sys.path,
        "place": place.to_json(),
        "largest": LARGEST_RESULT,
    }
    try:
        popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(start)],
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            env={"PYTHONHASHSEED": "0", **os.environ, WORKER: "1", _MARK: mark},  # all workers order a set alike
            start_new_session=True,
            pass_fds=(theirs.fileno(), life_read),
        )
    except BaseException:
        ours.close()
        os.close(life_write)
        os.close(output_read)
        raise
    finally:
        theirs.close()
        os.close(life_read)
        os.close(output_write)
    ours.setblocking(False)
    os.set_blocking(output_read, False)
    return Process(popen, ours, output_read, life_write, mark)


class Death:
    """When a process ends, without waiting for it: until it is waited for, its number is its own."""

    def __init__(self, process: Process) -> None:
        self._popen = process.popen
        self.descriptor: int | None = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        self.tick_ms = None if self.descriptor is not None else 100
        self._poll = select.poll()
        if self.descriptor is not None:
            self._poll.register(self.descriptor, select.POLLIN)

    def came(self) -> bool:
        return bool(self._poll.poll(0)) if self.descriptor is not None else self._popen.poll() is not None

    def __enter__(self) -> Death:
        return self

    def __exit__(self, *exc: object) -> None:
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
