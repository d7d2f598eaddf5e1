"""`Cluster`: the little that the rest of the package knows about more than one process. Start a process, call it, kill
it, hear of its end, and keep a value that many calls read.

Only bytes, numbers and arrays cross it: code travels as references and files, never as pickled objects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from toolwise.errors import ToolwiseError

Payload = Mapping[str, "bytes | int | float | np.ndarray[Any, Any]"]


class ClusterError(ToolwiseError):
    """The cluster cannot do what it was asked."""


class ProcessDiedError(ClusterError):
    """The process of a call has ended."""


class CallTimeoutError(ClusterError):
    """A call did not return before its deadline."""


class StoreFullError(ClusterError):
    """The object store had no room until the deadline."""


class RemoteCallError(ClusterError):
    """The code of a process raised an error."""


class RefusedError(ClusterError):
    """A process refuses what it was asked, and works as before: weights that do not follow on its own."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process needs of its node."""

    cpus: float = 1.0
    gpus: float = 0.0
    node: str = ""
    """The id of the node it must run on; empty: any, spread over all."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the cluster."""

    number: int
    """Never used again."""
    name: str


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """A process has ended, by itself or with its node."""

    process: Process
    reason: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A payload in the object store. It is freed when nothing refers to this any more."""

    reference: Any
    bytes: int


class Cluster(Protocol):
    """Every wait has a deadline, after which `CallTimeoutError` is raised."""

    async def start(
        self, role: str, name: str, payload: Payload, resources: Resources, *, deadline_s: float, stored: Stored | None
    ) -> Process:
        """Start a process of a role (see `roles.py`) and wait until it is ready. Raises the error of its code."""

    async def call(
        self, process: Process, method: str, payload: Payload, *, deadline_s: float, stored: Stored | None = None
    ) -> Payload:
        """Call a method of the process; `stored` is added to the payload. Cancelling the caller cancels the call."""

    async def address(self, process: Process, *, deadline_s: float) -> str:
        """The IP address of the process's node, by which the other nodes reach it."""

    async def kill(self, process: Process) -> None:
        """End a process; one that has ended is no error."""

    def events(self) -> AsyncIterator[ProcessExit]:
        """The ends of processes from now on."""

    async def store(self, payload: Payload, *, deadline_s: float) -> Stored:
        """Put a payload into the object store. Waits while it is full."""

    def show(self, process: str, counters: Mapping[str, float]) -> None:
        """Show the counters of a process on the dashboard of the cluster, if it has one."""

    async def close(self) -> None:
        """End all processes."""


def check_payload(payload: Mapping[str, Any]) -> Payload:
    """Raise unless the payload holds only bytes, numbers and arrays of numbers, by name."""
    for name, value in payload.items():
        plain = isinstance(value, bytes | int | float) or (
            isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and not value.dtype.hasobject
        )
        if not isinstance(name, str) or not plain:
            raise ClusterError(
                f"{name!r} is a {type(value).__name__}: only bytes, numbers and arrays of numbers cross processes"
            )
    return payload


def same_payload(left: Payload, right: Payload) -> bool:
    def same(one: Any, other: Any) -> bool:
        return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)

    return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)


def payload_bytes(payload: Payload) -> int:
    return sum(
        len(value) if isinstance(value, bytes) else value.nbytes if isinstance(value, np.ndarray) else 8
        for value in payload.values()
    )
