"""Waiting that ends: a deadline ends the work and not only the wait, and what began together ends together."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar, cast

log = logging.getLogger("toolwise.waiting")
T = TypeVar("T")

GRACE_S = 1.0
"""How long cancelled work may take to put itself away before it is abandoned."""


async def end_within(limit_s: float, work: Coroutine[Any, Any, T], late: Exception) -> T:
    """What `work` gives. Past `limit_s` it is cancelled, abandoned where it does not heed that, and `late` is raised.

    `late` is the caller's own, so that it is never taken for a `TimeoutError` that the work raised.
    """
    if limit_s <= 0:
        work.close()
        raise late
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            raise late
        if task.cancelled():  # by itself: this must not pass for a cancellation of whoever waits
            raise RuntimeError("it cancelled itself")
        return task.result()
    finally:
        if not task.done():
            await _put_away(task, work)


async def _put_away(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # whatever it says now is too late
    await asyncio.wait({task}, timeout=GRACE_S)
    if not task.done():
        log.warning("%s does not heed its cancellation and is left behind", getattr(work, "__qualname__", work))


async def in_thread(work: Callable[[], T]) -> T:
    """What blocking `work` gives, from a thread of its own.

    The loop's shared threads are few: there, calls that hang keep out all others, and calls that queue are late before
    they begin. A thread nobody waits for any more is left behind; it holds up neither the loop nor the way out.
    """
    loop = asyncio.get_running_loop()
    given: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, fault: BaseException | None) -> None:
        if given.done():
            return
        if fault is None:
            given.set_result(cast("T", result))
        else:
            given.set_exception(fault)

    def run() -> None:
        result: T | None = None
        fault: BaseException | None = None
        try:
            result = context.run(work)
        except StopIteration as stop:  # a future takes any exception but this one
            fault = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:
            fault = raised
        with suppress(RuntimeError):  # the loop is closed: nobody is there to hear of it
            loop.call_soon_threadsafe(settle, result, fault)

    context = contextvars.copy_context()
    threading.Thread(target=run, name="toolwise-work", daemon=True).start()
    return await given


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. A fault, or a cancellation, is raised only after every piece of work has come to its end:
    a plain `gather` would leave the others running."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)
