"""Deadlines that stop the work and not only the wait, blocking calls in threads, and an `asyncio.run` that returns."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

from toolwise.concurrency.tasks import all_tasks, hide_task, spawn, unhide_task, unregister_task, wait_all
from toolwise.untrusted import user_code

log = logging.getLogger("toolwise.concurrency.deadlines")
T = TypeVar("T")

GRACE_S = 1.0
"""How long cancelled work may take to clean up before it is abandoned."""

_abandoned: Counter[str] = Counter()
_abandoned_tasks: list[asyncio.Task[Any]] = []
"""Abandoned tasks of closed loops, kept alive: garbage collection would throw into their coroutines once more."""


def abandoned_counts() -> dict[str, int]:
    """How much work ignored its cancellation and was abandoned since this process started, by name."""
    return dict(_abandoned)


def count_abandoned(name: str, why: str) -> None:
    """Count work that outlives its caller, in `abandoned_counts`, and log it."""
    _abandoned[name] += 1
    log.warning("%s %s and is abandoned (%d so far)", name, why, _abandoned[name])


def in_virtual_time() -> bool:
    """Whether the running loop has `virtual_time = True`: threads and processes cannot run on simulated time."""
    return bool(getattr(asyncio.get_running_loop(), "virtual_time", False))


class WorkClock:
    """Measures work against its deadline; paused while the work waits in a queue.

    `run_with_deadline(…, clock)` starts it, `exclude_queue_time` pauses it. Time spent waiting for a worker or a slot
    is added to `queue_s` instead; only an enclosing deadline covers it.
    """

    __slots__ = ("_left_s", "_loop", "_pauses", "_phase_start", "_timer", "_woken", "queue_s")

    def __init__(self) -> None:
        self.queue_s = 0.0
        self._pauses = 0
        self._phase_start = 0.0
        """When the clock last started or paused."""
        self._timer: asyncio.TimerHandle | None = None
        self._woken: asyncio.Future[None] | None = None

    def start(self, limit_s: float, woken: asyncio.Future[None]) -> None:
        self._loop, self._woken, self._left_s = asyncio.get_running_loop(), woken, limit_s
        self._run()

    def stop(self) -> None:
        """Stop measuring. Remains of the work may still wait in a queue, but that no longer counts."""
        if self._timer is not None:
            self._timer.cancel()
        elif self._pauses:
            self.queue_s += self._loop.time() - self._phase_start
        self._timer = self._woken = None

    def pause(self) -> None:
        self._pauses += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            now = self._loop.time()
            self._left_s, self._phase_start = self._left_s - (now - self._phase_start), now

    def resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and self._woken is not None:
            self.queue_s += self._loop.time() - self._phase_start
            self._run()

    def _run(self) -> None:
        self._phase_start = self._loop.time()
        self._timer = self._loop.call_later(self._left_s, wake, self._woken)

    @property
    def is_running_here(self) -> bool:
        """Whether it runs in this event loop: work handed to another loop inherits the context variable."""
        return self._woken is not None and self._loop is asyncio.get_running_loop()


_clock: contextvars.ContextVar[WorkClock | None] = contextvars.ContextVar("toolwise_work_clock", default=None)


@contextmanager
def exclude_queue_time() -> Iterator[None]:
    """Wrap a wait for a worker or a slot: it does not count towards the deadline of the waiting work."""
    clock = _clock.get()
    if clock is None or not clock.is_running_here:
        yield
        return
    clock.pause()
    try:
        yield
    finally:
        clock.resume()


def exclude_pool_queue_time(work: Callable[[], T]) -> Callable[[], T]:
    """Wrap `work` for a thread pool, so that the time until a thread starts it does not count."""
    clock = _clock.get()
    if clock is None or not clock.is_running_here:
        return work
    loop = asyncio.get_running_loop()
    clock.pause()

    def begin() -> T:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(clock.resume)
        return work()

    return begin


async def run_with_deadline(
    limit_s: float, work: Coroutine[Any, Any, T], timeout_error: Exception, clock: WorkClock | None = None
) -> T:
    """Return the result of `work`. After `limit_s` cancel it (abandon it if it ignores that) and raise `timeout_error`.

    The caller supplies `timeout_error`, so that it cannot be mistaken for a `TimeoutError` raised by the work. With a
    `clock`, queue time (`exclude_queue_time`) does not count.
    """
    if limit_s <= 0:
        work.close()
        raise timeout_error
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    guarded = _notify_when_done(work, woken)
    # The name it is reported under if it is abandoned.
    cast("Any", guarded).__qualname__ = getattr(work, "__qualname__", "") or str(work)
    timer = clock or WorkClock()
    timer.start(limit_s, woken)
    token = _clock.set(clock or _clock.get())
    task = spawn(guarded)  # the task copies the context
    _clock.reset(token)
    try:
        await woken
        if not task.done():
            raise timeout_error
        if task.cancelled():  # by itself: must not look like a cancellation of the caller
            raise user_code.UserCodeError("it cancelled itself")
        return task.result()
    finally:
        timer.stop()
        if not task.done():
            await _cancel_and_wait(task, work)
        elif not task.cancelled():
            task.exception()  # mark as retrieved: the caller may have been cancelled at the same moment


def wake(woken: asyncio.Future[None] | None) -> None:
    """Let the caller that awaits `woken` continue."""
    if woken is not None and not woken.done():
        woken.set_result(None)


async def _notify_when_done(work: Coroutine[Any, Any, T], woken: asyncio.Future[None]) -> T:
    """Wake the waiting caller when `work` ends; a done callback or `asyncio.wait` would cost one more loop iteration.

    Exceptions such as `SystemExit` are converted: a `sys.exit()` in a task would end the loop, and the run with it.
    """
    try:
        return await user_code.await_user_code(work)
    finally:
        wake(woken)


async def _cancel_and_wait(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Cancel `task` and wait for it, the full grace period even if the caller is cancelled, so that work that keeps
    running is always counted."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the result comes too late
    try:
        await wait_all([task], GRACE_S)
    finally:
        if task.done():
            work.close()  # in case it never started: avoids the "never awaited" warning
        else:
            unhide_task(task)  # no longer managed here
            count_abandoned(getattr(work, "__qualname__", str(work)), "ignores its cancellation")


async def call_in_thread(work: Callable[[], T], *, name: str = "blocking work") -> T:
    """Run blocking `work` in a new thread and return its result.

    The loop's default executor has few threads: calls that hang would block all others, and queued calls would be late
    before they start. If the caller is cancelled, the thread is abandoned and counted under `name`; it delays neither
    the loop nor interpreter exit.
    """
    future = _start_thread(partial(contextvars.copy_context().run, work))
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.done():
            count_abandoned(name, "cannot be stopped in its thread")
        raise


async def gather_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. An error or a cancellation is raised only after everything has finished; a plain `gather`
    would leave the rest running."""
    coroutines = list(works)
    if len(coroutines) == 1:  # the most common case, without a task
        return [await coroutines[0]]
    tasks = [spawn(user_code.await_user_code(work)) for work in coroutines]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for work in coroutines:
            work.close()  # those cancelled before they started: avoids the "never awaited" warning
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but sure to return: tasks that ignore cancellation are abandoned after `GRACE_S`, and threads
    that hang in an `asyncio.to_thread` are not joined. It also returns no earlier than `work`, whatever tasks of user
    code do to the loop; only Ctrl-C interrupts it."""

    async def run_main() -> T:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(_ThreadPerCallExecutor())
        main = asyncio.current_task()
        assert main is not None
        hide_task(main)
        _forbid_loop_stop(loop, main)
        try:
            return await work
        finally:
            await _cancel_all_tasks()

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        _survive_task_exits(loop)
        try:
            return runner.run(run_main())
        finally:
            for task in all_tasks(loop):  # asyncio ends the rest
                unhide_task(task)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, also in a notebook, where an event loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, work).result()


def _forbid_loop_stop(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
    stop = loop.stop

    def refuse() -> None:
        if not main.done():
            raise RuntimeError("the event loop belongs to the run: do not stop it")
        stop()

    with suppress(AttributeError):  # a loop not written in Python: `_survive_task_exits` covers it
        cast("Any", loop).stop = refuse


def _survive_task_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Re-enter the loop when a task in user code makes asyncio leave it (`SystemExit`, `KeyboardInterrupt`)."""
    original = loop.run_until_complete

    def run_until_complete(future: Any) -> Any:
        main = asyncio.ensure_future(future, loop=loop)
        while True:
            try:
                return original(main)
            except BaseException as fault:
                if main.done() or loop.is_closed() or user_code.is_interrupt(fault):
                    raise
                log.warning("a task in user code raised %s: the run continues", user_code.describe(fault))

    with suppress(AttributeError):
        cast("Any", loop).run_until_complete = run_until_complete


async def _cancel_all_tasks() -> None:
    """Cancel all other tasks of the loop; unregister those that ignore it."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    if tasks := all_tasks() - {me}:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=GRACE_S)
    await asyncio.wait({spawn(loop.shutdown_asyncgens())}, timeout=GRACE_S)
    for task in all_tasks() - {me}:
        count_abandoned(getattr(task.get_coro(), "__qualname__", repr(task)), "ignores its cancellation")
        unregister_task(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        _abandoned_tasks.append(task)


class _ThreadPerCallExecutor(ThreadPoolExecutor):
    """One daemon thread per call: the standard executor has few threads, and joins them at interpreter exit."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return _start_thread(partial(fn, *args, **kwargs))


def _start_thread(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run_work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except StopIteration as stop:  # the only exception that an asyncio future refuses
            future.set_exception(RuntimeError(f"StopIteration: {stop}"))
        except BaseException as fault:
            future.set_exception(fault)

    threading.Thread(target=run_work, name="toolwise-work", daemon=True).start()
    return future
