"""Concurrency limits for model requests, each tool, and environments. First come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from weakref import WeakKeyDictionary


class Gate:
    """Admits up to `limit` holders at a time; None means unlimited. It can serve several event loops in sequence."""

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
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
        return self._by_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(limit))


class Slot:
    """The one gate that an episode currently holds. Any code may release it: abandoned work that never returns must not
    block others for ever."""

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
    """The gates of one scheduler. Waiting at one counts towards the episode's deadline, not towards a tool's."""

    model: Gate = UNLIMITED
    env: Gate = UNLIMITED
    tools: Mapping[str, Gate] = field(default_factory=dict)
