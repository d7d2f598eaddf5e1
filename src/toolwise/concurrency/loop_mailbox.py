"""Hands things from threads to event loops. Waking a loop costs more than most of what there is to say, so a loop that
is busy gets all that has come meanwhile in one call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class LoopMailbox(Generic[T]):
    """`receive` is called in the loop, with what was sent to it since the last call, in order."""

    def __init__(self, receive: Callable[[asyncio.AbstractEventLoop, list[T]], None]) -> None:
        self._receive = receive
        self._waiting: dict[asyncio.AbstractEventLoop, list[T]] = {}
        self._lock = threading.Lock()

    def send(self, loop: asyncio.AbstractEventLoop, items: Iterable[T]) -> None:
        """Callable from any thread. What is sent to a closed loop is dropped: no caller waits there."""
        with self._lock:
            self._waiting = {each: waiting for each, waiting in self._waiting.items() if not each.is_closed()}
            if loop in self._waiting:
                self._waiting[loop] += items
                return
            self._waiting[loop] = list(items)
        with suppress(RuntimeError):  # closed
            loop.call_soon_threadsafe(self._open, loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            items = self._waiting.pop(loop, [])
        self._receive(loop, items)
