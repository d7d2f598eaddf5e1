"""Forks workers from a process that has already loaded their module: ready in milliseconds, most memory shared.

The trainer itself is never forked, as it has threads. A zygote is a fresh interpreter that loads the module once and
waits; `forks.py` is its side. Its children have their own pipes to the trainer and their own sessions.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from toolwise.sandbox import frames
from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.layers.descriptors import closing_fd, wait_ready
from toolwise.sandbox.layers.process_info import is_stopped
from toolwise.sandbox.processes import open_pipes
from toolwise.tools.isolation.process import Process

AVAILABLE = sys.platform == "linux"
"""On other systems libraries do not survive a fork, and the exit of a grandchild cannot be watched."""
REPLY_TIMEOUT_S = 20.0
"""How long a fork may take on a busy machine."""
POLL_S = 0.2


class Zygote:
    """The trainer's handle of a zygote. Requests may come from any thread, and run one at a time."""

    def __init__(self, process: Process, pid: int) -> None:
        self._process, self._pid = process, pid
        process.detach_children()
        self._lock = threading.Lock()
        self._frame_reader = frames.FrameReader(1 << 16)
        self.gone = False

    def fork(self) -> Process:
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
            return Process(ForkedChild(self, pid), *ends, mark)

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
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

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
