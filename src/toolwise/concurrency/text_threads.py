"""Threads for parsing, rendering and tokenising: work on long texts, which would block the event loop for others."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
LONG_CHARS = 20_000
"""A text of this length takes milliseconds; a thread costs a tenth of one."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="toolwise-text")


async def run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work`, which finishes even if the caller is cancelled."""
    call = partial(contextvars.copy_context().run, work, *arguments)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


async def run_if_long(chars: int, work: Callable[..., T], *arguments: Any) -> T:
    """Like `run_in_thread` for work on a long text; at once for a short one."""
    return await run_in_thread(work, *arguments) if chars > LONG_CHARS else work(*arguments)
