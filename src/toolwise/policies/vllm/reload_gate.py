"""Keeps requests away from a server whose weights are being replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class ReloadGate:
    """A context manager around each request. While it is closed, new requests wait; `empty` waits until those inside
    have ended. It can serve several event loops in sequence."""

    def __init__(self) -> None:
        self.closed = False
        self.inside = 0
        self._waiters: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> None:
        await self._until(lambda: not self.closed)
        self.inside += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inside -= 1
        self._wake_waiters()

    def close(self) -> None:
        self.closed = True

    def open(self) -> None:
        self.closed = False
        self._wake_waiters()

    async def empty(self) -> None:
        await self._until(lambda: not self.inside)

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            woken = asyncio.get_running_loop().create_future()
            self._waiters.append(woken)
            try:
                await woken
            finally:
                self._waiters.remove(woken)

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
