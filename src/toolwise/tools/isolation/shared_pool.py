"""Where tools run that can only be stopped by killing them: the worker processes that all tools share.

`await run(target, parameters)` gives what a function tool gives. Whoever is cancelled while it waits, by a deadline or
otherwise, ends the process that works for it at once.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from toolwise.tools.isolation.code_location import ObjectRef
from toolwise.tools.isolation.pool import Pool

_shared: Pool | None = None
_shared_lock = threading.Lock()


def shared_pool() -> Pool:
    """The pool of this process; made on first use."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared.closed:
            _shared = Pool()
        return _shared


async def run(
    target: ObjectRef, parameters: dict[str, Any], kwargs: dict[str, Any] | None = None
) -> tuple[str, float | None, dict[str, Any]]:
    """What `target`, a function tool, gives for the model's arguments and the task's, from a shared worker."""
    return await shared_pool().run(target, parameters, kwargs)


def close() -> None:
    """Ends the shared workers; the next call brings up new ones."""
    if _shared is not None:
        _shared.close()


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    if _shared is not None:
        _shared.abandon()


atexit.register(close)
os.register_at_fork(after_in_child=_after_fork)
