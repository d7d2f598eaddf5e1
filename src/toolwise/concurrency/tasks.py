"""asyncio tasks of the run, hidden from `asyncio.all_tasks()` so that user code cannot find and cancel them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")

_hidden: WeakSet[asyncio.Task[Any]] = WeakSet()


def spawn(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return hide_task(asyncio.get_running_loop().create_task(work))


async def wait_all(tasks: Sequence[asyncio.Future[Any]], timeout_s: float = math.inf) -> None:
    """Wait for all tasks to finish, or for `timeout_s`, however often the caller is cancelled meanwhile."""
    loop = asyncio.get_running_loop()
    until, cancelled = loop.time() + timeout_s, False
    while (pending := [task for task in tasks if not task.done()]) and (left_s := until - loop.time()) > 0:
        try:
            await asyncio.wait(pending, timeout=left_s if left_s < math.inf else None)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def all_tasks(loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:
    """`asyncio.all_tasks` including hidden tasks."""
    loop = loop if loop is not None else asyncio.get_running_loop()
    return asyncio.all_tasks(loop) | {task for task in list(_hidden) if task.get_loop() is loop and not task.done()}


def hide_task(task: asyncio.Task[T]) -> asyncio.Task[T]:
    unregister_task(task)
    _hidden.add(task)
    return task


def unhide_task(task: asyncio.Task[Any]) -> None:
    """Make the task visible to asyncio again."""
    _hidden.discard(task)
    asyncio.tasks._register_task(task)


def unregister_task(task: asyncio.Task[Any]) -> None:
    """Remove a task from our registry and from asyncio's."""
    _hidden.discard(task)
    asyncio.tasks._unregister_task(task)  # documented in "Extending asyncio"


def raise_if_cancelled() -> None:
    """The awaited work may have swallowed a cancellation of this task."""
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError
