"""Runs tools in worker processes, which can be killed when a call ignores its deadline.

All tools of this process share one pool of workers.
"""

from __future__ import annotations

import atexit
import os
import threading

from toolwise.tools.isolation.tool_pool import ToolPool

_shared: ToolPool | None = None
_shared_lock = threading.Lock()


def shared_pool() -> ToolPool:
    """The pool of this process, created on first use."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared.closed:
            _shared = ToolPool()
        return _shared


def close() -> None:
    """End the shared workers; the next call starts new ones."""
    if _shared is not None:
        _shared.close()


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    if _shared is not None:
        _shared.abandon()


atexit.register(close)
os.register_at_fork(after_in_child=_after_fork)
