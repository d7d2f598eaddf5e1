"""A time limit on user code that the main thread waits for: a parser, a router, a tracker or a callback.

It is raised from a signal handler, so it also ends a regular expression or a read from a socket that never returns.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
REPEAT_S = 1.0
"""The limit is raised again after this time, as long as the code that caught it goes on."""


class TimeLimitExceeded(BaseException):
    """Raised inside the user's code. Not an `Exception`: code that catches those and tries again must end, too."""


class TimeLimitError(TimeoutError):
    """What the caller sees instead."""


def call_within(limit_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`; after `limit_s` seconds it ends with a `TimeLimitExceeded`. Signals interrupt the main thread
    only: in any other there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        return function(*args, **kwargs)
    started, waiting = time.monotonic(), True

    def expire(*_: object) -> None:
        if waiting:
            raise TimeLimitExceeded(f"took longer than {limit_s:g} s")

    handler, left_s, interval_s = signal.getsignal(signal.SIGALRM), 0.0, 0.0
    try:  # around the setup too: an interrupt from the keyboard may arrive at any call
        signal.signal(signal.SIGALRM, expire)
        left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, REPEAT_S)
        return function(*args, **kwargs)
    finally:
        waiting = False  # first, and without a call: a signal can only arrive at calls
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if left_s:  # somebody else's timer
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - started), 1e-6), interval_s)
