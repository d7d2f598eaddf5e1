"""Threads for parsing, rendering and tokenising: work on long texts, which would block the event loop for others."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from toolwise.concurrency.loop_mailbox import LoopMailbox

T = TypeVar("T")
LONG_CHARS = 20_000
"""A text of this length takes milliseconds; a thread costs a tenth of one."""
_COUNT = 2

Call = Callable[[], Any]
Result = tuple["asyncio.Future[Any]", Any, BaseException | None]
"""Of a call: who waits for it, its value, or what it raised."""


class _TextThreads:
    """Threads that share one queue. A pool's own futures would cost more than a short call does."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_COUNT, thread_name_prefix="toolwise-text")
        self._calls: deque[tuple[asyncio.Future[Any], Call]] = deque()
        self._working = 0
        self._lock = threading.Lock()
        self._results = LoopMailbox[Result](_resolve)

    def submit(self, call: Call) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._calls.append((future, call))
            idle = self._working < _COUNT
            self._working += idle
        if idle:
            self._threads.submit(self._work)
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._working -= 1
                    return
                future, call = self._calls.popleft()
            if future.cancelled():  # before its turn
                continue
            value, fault = None, None
            try:
                value = call()
            except BaseException as raised:  # no future takes a StopIteration
                fault = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
            self._results.send(future.get_loop(), [(future, value, fault)])
            del future, call, value, fault  # they may be large, and the next call may be long


def _resolve(loop: asyncio.AbstractEventLoop, results: list[Result]) -> None:
    for future, value, fault in results:
        if future.done():
            continue
        if fault is None:
            future.set_result(value)
        else:
            future.set_exception(fault)


_THREADS = _TextThreads()


async def run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work`, which finishes even if the caller is cancelled."""
    result: T = await _THREADS.submit(partial(contextvars.copy_context().run, work, *arguments))
    return result


async def run_if_long(chars: int, work: Callable[..., T], *arguments: Any) -> T:
    """Like `run_in_thread` for work on a long text; at once for a short one."""
    return await run_in_thread(work, *arguments) if chars > LONG_CHARS else work(*arguments)
