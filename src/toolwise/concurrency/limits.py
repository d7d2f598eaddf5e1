"""How much may go on at once: of model requests, of each tool, of environments. First come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from weakref import WeakKeyDictionary


class Gate:
    """Lets so many in at a time; None lets everybody in. One gate may serve several event loops, one after another."""

    __slots__ = ("_by_loop", "limit")

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"a limit of {limit} lets nobody in")
        self.limit = limit
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def enter(self) -> None:
        if self.limit is not None:
            await self._semaphore(self.limit).acquire()

    def leave(self) -> None:
        if self.limit is not None:
            self._semaphore(self.limit).release()

    async def __aenter__(self) -> None:
        await self.enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _semaphore(self, limit: int) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop[loop] = asyncio.Semaphore(limit)
        return self._by_loop[loop]


class Slot:
    """One episode's place inside a gate, one at a time. Somebody else may give it up: work that was left behind, and
    never comes out by itself, must not keep others out for ever."""

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate: Gate | None = None

    async def acquire(self, gate: Gate) -> None:
        if gate.limit is not None:
            await gate.enter()
            self._gate = gate

    def release(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.leave()


UNLIMITED = Gate()


@dataclass(frozen=True, slots=True)
class Limits:
    """The gates of one scheduler. Waiting at one counts towards an episode's deadline, not towards a tool's."""

    model: Gate = UNLIMITED
    env: Gate = UNLIMITED
    tools: Mapping[str, Gate] = field(default_factory=dict)
