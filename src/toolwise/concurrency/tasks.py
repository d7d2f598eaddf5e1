"""asyncio tasks of the run, hidden from `asyncio.all_tasks()` so that user code cannot find and cancel them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")

_hidden: WeakSet[asyncio.Task[Any]] = WeakSet()


def spawn(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return hide_task(asyncio.get_running_loop().create_task(work))


async def wait_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all tasks to finish, however often the caller is cancelled meanwhile."""
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
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
