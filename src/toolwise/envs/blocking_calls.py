"""Worlds that block: their calls run off the event loop, and one that never comes back is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from toolwise.concurrency.deadlines import call_in_thread, in_virtual_time
from toolwise.untrusted import user_code

T = TypeVar("T")


class BlockingCalls:
    """The calls of one object that blocks, such as a game or a database handle. Deadlines are the caller's.

    A call whose caller is gone (it was late, or the episode was cancelled) cannot be ended. Its object is then in a
    state nobody knows, so further calls are refused, and closing is left to the thread that is still inside.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.has_hung_call = False
        self._running = False
        self._closed = False
        self._close_callback: Callable[[], object] | None = None
        self._lock = threading.Lock()

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` gives, or raises; what would end the whole program ends only the call."""
        if self.has_hung_call or self._closed:
            raise RuntimeError(f"{self.what} cannot go on: an earlier call did not come back, or it is closed")
        came_back = False
        try:
            value = await self._run_off_loop(partial(self._run, work))
            came_back = True
        except Exception:
            came_back = True
            raise
        finally:
            self.has_hung_call = self.has_hung_call or not came_back
        return value

    async def end(self, closing: Callable[[], object]) -> None:
        """Run `closing`, once; where a call is still inside, its thread does so when it comes back."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._running:
                self._close_callback = closing
                return
        await self._run_off_loop(partial(user_code.call_user_code, closing))

    async def _run_off_loop(self, work: Callable[[], T]) -> T:
        return work() if in_virtual_time() else await call_in_thread(work, name=self.what)

    def _run(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self._closed:  # given up before this thread came to run
                raise RuntimeError(f"{self.what} is closed")
            self._running = True
        try:
            return user_code.call_user_code(work)
        finally:
            with self._lock:
                self._running = False
                closing = self._close_callback
            if closing is not None:
                closing()
