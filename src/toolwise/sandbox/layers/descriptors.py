"""File descriptors: closed at the end of a block, and waited for."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closing_fd(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def wait_ready(descriptor: int, timeout_s: float | None, event: int = select.POLLIN) -> bool:
    """Whether it is ready within `timeout_s` (None: wait until it is). `event` 0: only when its other end is closed."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
