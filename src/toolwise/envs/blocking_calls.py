"""Run an environment's blocking calls in threads, off the event loop, and abandon calls that never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from toolwise.concurrency.deadlines import call_in_thread, in_virtual_time
from toolwise.untrusted import user_code

T = TypeVar("T")


class BlockingCalls:
    """Blocking calls of one object, such as a game or a database handle. The caller enforces timeouts.

    A call whose caller is gone (after a timeout or a cancelled episode) cannot be stopped. Its object is then in an
    unknown state, so further calls are refused, and the thread that is still in the call closes the object.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.has_hung_call = False
        self._running = False
        self._closed = False
        self._close_callback: Callable[[], object] | None = None
        self._lock = threading.Lock()

    async def call(self, work: Callable[[], T]) -> T:
        """Return the result of `work` or raise its exception; one that would end the program ends only the call."""
        if self.has_hung_call or self._closed:
            raise RuntimeError(f"{self.what} cannot go on: an earlier call did not come back, or it is closed")
        try:
            return await self._run_off_loop(partial(self._run, work))
        except Exception:
            raise
        except BaseException:  # the caller is gone, and the call goes on
            self.has_hung_call = True
            raise

    async def end(self, closing: Callable[[], object]) -> None:
        """Run `closing` once; if a call is still running, its thread does so when the call returns."""
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
            if self._closed:  # abandoned before this thread started
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
