"""When Python looks for reference cycles: seldom while many episodes run, and never in what a run began with.

A collection stops every thread. A full one scans all objects, those of the imported libraries too, which takes most
of a second: about as long as a training step on a GPU.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 50_000
"""New objects after which the youngest generation is collected."""
_lock = threading.Lock()
_users, _previous = 0, gc.get_threshold()


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Collect less often: thousands of episodes keep what they allocate, and scanning it every 700 objects, as Python
    does by default, takes as long as the work itself."""
    global _users, _previous  # runs and servers of one process may end in any order: the last one restores it
    with _lock:
        if not _users:
            _previous = gc.get_threshold()
            if 0 < _previous[0] < THRESHOLD:  # neither disabled nor already set higher
                gc.set_threshold(THRESHOLD, *_previous[1:])
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                gc.set_threshold(*_previous)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave out all objects that exist now, such as modules and the model: full collections then take as long as what
    was added since. Garbage is collected first, such as the model of a run that failed. Does nothing if objects are
    left out already: by a run around this one, or by the caller."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
