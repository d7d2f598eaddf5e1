"""asyncio tasks of the run's own: other people's code that cancels `asyncio.all_tasks()` does not find them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")

_hidden: WeakSet[asyncio.Task[Any]] = WeakSet()


def spawn(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return hide_task(asyncio.get_running_loop().create_task(work))


def all_tasks(loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:
    """`asyncio.all_tasks`, ours among them."""
    loop = loop if loop is not None else asyncio.get_running_loop()
    return asyncio.all_tasks(loop) | {task for task in list(_hidden) if task.get_loop() is loop and not task.done()}


def hide_task(task: asyncio.Task[T]) -> asyncio.Task[T]:
    unregister_task(task)
    _hidden.add(task)
    return task


def unhide_task(task: asyncio.Task[Any]) -> None:
    """Nobody's but asyncio's again."""
    _hidden.discard(task)
    asyncio.tasks._register_task(task)


def unregister_task(task: asyncio.Task[Any]) -> None:
    """Takes a task off everybody's books."""
    _hidden.discard(task)
    asyncio.tasks._unregister_task(task)  # documented under Extending asyncio
