"""A time limit on user code outside the main thread, where signals interrupt nothing: the code runs in a thread of its
own, which the caller stops waiting for.

A thread cannot be ended from outside. The one that took too long is abandoned: it goes on, but nobody waits for it, not
even the end of the program.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from toolwise.untrusted.time_limit import TimeLimitExceeded

P = ParamSpec("P")
T = TypeVar("T")


class LimitedThread:
    """Calls functions one after the other in the same thread, as long as none takes too long: what a library opens in
    a thread, such as a database, it may want to use there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self._thread: threading.Thread | None = None

    def call(self, limit_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, or what it raises; a `TimeLimitExceeded` if it takes more than `limit_s` seconds,
        with the line where it waits."""
        context, future = contextvars.copy_context(), Future[T]()
        if self._calls is None:
            self._calls = SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name=self.name, daemon=True)
            self._thread.start()
        self._calls.put((future, lambda: context.run(function, *args, **kwargs)))
        try:
            return future.result(limit_s)
        except TimeoutError:
            if future.done():  # its own error, or just in time
                return future.result()
            exceeded, thread = TimeLimitExceeded(f"took longer than {limit_s:g} s"), self._thread
            self.close()
            raise exceeded.with_traceback(_where(thread)) from None

    def close(self) -> None:
        """End the thread, once it has nothing more to do; another call starts another one."""
        if self._calls is not None:
            self._calls.put(None)
        self._calls = self._thread = None


def _serve(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        try:
            future.set_result(function())
        except BaseException as fault:  # also SystemExit and others, for the caller to judge
            future.set_exception(fault)
        del call, future, function  # they hold what the caller has long forgotten


def _where(thread: threading.Thread | None) -> TracebackType | None:
    """The frames of the function that a thread is in."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0) if thread is not None else None
    traceback: TracebackType | None = None
    while frame is not None and frame.f_code is not _serve.__code__:
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return traceback
