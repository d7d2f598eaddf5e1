"""The zygote's side: decides whether a process may be forked after loading a module, and forks the workers.

Random generators created when the module was loaded are reseeded: forked workers would all sample the same numbers.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

from toolwise.sandbox import wire
from toolwise.sandbox.layers.supervisor import supervise
from toolwise.sandbox.process_tree import MARK_VARIABLE

_unseeded: WeakSet[random.Random] = WeakSet()
"""Generators created during `track_unseeded` without a seed."""


def open_descriptors() -> set[str]:
    """Open file descriptors, without the one used to list them."""
    with suppress(OSError):
        return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
    return set()


def can_be_forked(before: set[str]) -> bool:
    """Whether workers may share what a module created when it was loaded.

    Threads do not survive a fork, and the locks they hold stay locked. Files and connections would be shared by all
    workers, as would a random generator that cannot be reseeded. A module that creates any of these is loaded
    separately by each worker.
    """
    if sys.platform != "linux" or not can_be_reseeded():
        return False
    return open_descriptors() <= before and len(os.listdir("/proc/self/task")) == 1


def fork_workers(channel: int) -> tuple[int, int, int]:
    """Fork a worker under a supervisor for each request. Returns only in the workers: channel, lifeline, output."""
    trainer = socket.socket(fileno=channel)
    gc.collect()
    gc.freeze()  # the collector must not touch loaded objects: pages that are not written to stay shared
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
            if mark_at is not None:  # the kernel's view of the environment still has the zygote's mark
                ctypes.memmove(mark_at, request["fork"].encode(), len(request["fork"]))
            supervise(lifeline)
            _detach_from_zygote(descriptors, request["fork"])
            return worker, lifeline, output
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            _reply(channel, {"pid": pid})


def _detach_from_zygote(keep: list[int], mark: str) -> None:
    """In a worker: drop everything inherited from the zygote."""
    for descriptor in {int(name) for name in open_descriptors()} - {0, 1, 2, *keep}:
        os.close(descriptor)
    for descriptor in keep:
        os.set_inheritable(descriptor, False)
    os.environ[MARK_VARIABLE] = mark
    reseed()


def _reap(pid: int) -> int | None:
    with suppress(ChildProcessError):
        reaped, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if reaped else None
    return None


def _reply(channel: int, message: dict[str, Any]) -> None:
    wire.write_all(channel, wire.to_frame(wire.encode(message)))


def _address_of_mark() -> int | None:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address: int | None = getenv(MARK_VARIABLE.encode())
    return address


@contextmanager
def track_unseeded() -> Iterator[None]:
    """While a module is loaded, record `random.Random` objects created without a seed, in libraries too."""
    seed, setstate = random.Random.seed, random.Random.setstate

    def tracking_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, a, version)
        with suppress(TypeError):  # an unhashable subclass
            (_unseeded.add if a is None else _unseeded.discard)(self)

    def tracking_setstate(self: random.Random, state: Any) -> None:
        setstate(self, state)
        with suppress(TypeError):
            _unseeded.discard(self)

    random.Random.seed, random.Random.setstate = tracking_seed, tracking_setstate  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed, random.Random.setstate = seed, setstate  # type: ignore[method-assign]


def can_be_reseeded() -> bool:
    """False if the module holds a numpy generator: whether it was seeded cannot be determined."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return True
    shared = numpy.mtrand._rand._bit_generator
    return not any(issubclass(type(obj), numpy.BitGenerator) and obj is not shared for obj in gc.get_objects())


def reseed() -> None:
    """Reseed in a forked worker. Seeded generators keep their state, as in a worker that loads the module."""
    for generator in _unseeded:
        random.Random.seed(generator)
    if "numpy.random" in sys.modules:  # Python reseeds its own generator after a fork
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
