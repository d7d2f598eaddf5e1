"""The zygote's own end: whether a process can be forked after it has loaded a module, and the forks themselves."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any

from toolwise.sandbox import frames
from toolwise.sandbox.layers.supervisor import supervise
from toolwise.tools.isolation.process import MARK_VARIABLE
from toolwise.tools.isolation.random_generators import can_be_reseeded, reseed


def open_descriptors() -> set[str]:
    """Without the one that the list itself is read from."""
    with suppress(OSError):
        return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
    return set()


def can_be_forked(before: set[str]) -> bool:
    """Whether workers may share what a module made when it was loaded.

    A thread does not survive a fork, with whatever lock it holds. Files and connections would be used by all workers at
    once, and so would a random generator that cannot be seeded anew. A module that leaves one of these behind is loaded
    by each worker for itself.
    """
    if sys.platform != "linux" or not can_be_reseeded():
        return False
    return open_descriptors() <= before and len(os.listdir("/proc/self/task")) == 1


def fork_workers(channel: int) -> tuple[int, int, int]:
    """Forks a worker, with a supervisor above it, for each request. Returns in the workers only: the channel, life and
    output."""
    trainer = socket.socket(fileno=channel)
    gc.collect()
    gc.freeze()  # what was loaded is not looked through again: pages that nobody writes to stay shared
    mark_at = _address_of_mark()
    while True:
        data, descriptors, _, _ = socket.recv_fds(trainer, 4096, 3)
        if not data:
            os._exit(0)
        request: dict[str, Any] = json.loads(data)
        if "reap" in request:
            _reply(channel, {"code": _reap(request["reap"])})
            continue
        try:
            pid = os.fork()
        except OSError as fault:
            _reply(channel, {"refused": f"no more processes: {fault.strerror}", "errno": fault.errno})
            pid = -1
        if pid == 0:
            trainer.detach()
            worker, lifeline, output = descriptors
            os.setsid()
            if mark_at is not None:  # where the kernel reads a process's environment, which still has the zygote's mark
                ctypes.memmove(mark_at, request["fork"].encode(), len(request["fork"]))
            supervise(lifeline)
            _detach_from_zygote(descriptors, request["fork"])
            return worker, lifeline, output
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            _reply(channel, {"pid": pid})


def _detach_from_zygote(own: list[int], mark: str) -> None:
    """In a worker: nothing of the zygote's."""
    for descriptor in {int(name) for name in open_descriptors()} - {0, 1, 2, *own}:
        os.close(descriptor)
    for descriptor in own:
        os.set_inheritable(descriptor, False)
    os.environ[MARK_VARIABLE] = mark
    reseed()


def _reap(pid: int) -> int | None:
    with suppress(ChildProcessError):
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    return None


def _reply(channel: int, message: dict[str, Any]) -> None:
    frames.write_all(channel, frames.to_frame(frames.encode(message)))


def _address_of_mark() -> int | None:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    found: int | None = getenv(MARK_VARIABLE.encode())
    return found
