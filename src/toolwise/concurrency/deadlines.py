"""Waiting that ends: a deadline ends the work and not only the wait, and what began together ends together."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from toolwise.concurrency.tasks import all_tasks, hide_task, spawn, unhide_task, unregister_task
from toolwise.untrusted import user_code

log = logging.getLogger("toolwise.concurrency.deadlines")
T = TypeVar("T")

GRACE_S = 1.0
"""How long cancelled work may take to put itself away before it is abandoned."""

_abandoned: Counter[str] = Counter()
_abandoned_tasks: list[asyncio.Task[Any]] = []
"""Abandoned tasks of loops that are closed: kept, since a coroutine that is collected is thrown into once more."""


def abandoned_counts() -> dict[str, int]:
    """What did not heed its end and was left behind since this process began: how often, by name."""
    return dict(_abandoned)


def _abandon(name: str, why: str) -> None:
    _abandoned[name] += 1
    log.warning("%s %s and is left behind (%d so far)", name, why, _abandoned[name])


def in_virtual_time() -> bool:
    """Whether the running loop makes its own time (it says so by `virtual_time = True`): neither a thread nor a process
    could keep step with it."""
    return bool(getattr(asyncio.get_running_loop(), "virtual_time", False))


class WorkClock:
    """How long a piece of work has worked, against its deadline; it stands still while the work waits in a queue.

    `run_with_deadline(…, clock)` starts it, `exclude_queue_time` halts it. Waiting for a worker or a place is not the
    work's time:
    `queue_s` has it, and the deadline of whatever is around the work covers it.
    """

    __slots__ = ("_left_s", "_loop", "_pauses", "_phase_start", "_timer", "_woken", "queue_s")

    def __init__(self) -> None:
        self.queue_s = 0.0
        self._pauses = 0
        self._phase_start = 0.0
        """When it last began to run, or to stand still."""
        self._timer: asyncio.TimerHandle | None = None
        self._woken: asyncio.Future[None] | None = None

    def start(self, limit_s: float, woken: asyncio.Future[None]) -> None:
        self._loop, self._woken, self._left_s = asyncio.get_running_loop(), woken, limit_s
        self._run()

    def stop(self) -> None:
        """The work is over; what is left of it may still wait, and that counts no more."""
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
        self._timer = self._loop.call_later(self._left_s, _wake, self._woken)

    @property
    def is_running_here(self) -> bool:
        """Whether it runs, and in this event loop: what is handed to another loop takes the context along."""
        return self._woken is not None and self._loop is asyncio.get_running_loop()


_clock: contextvars.ContextVar[WorkClock | None] = contextvars.ContextVar("toolwise_work_clock", default=None)


@contextmanager
def exclude_queue_time() -> Iterator[None]:
    """Around a wait for a worker or a place: none of it is charged to the deadline of the work that waits."""
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
    """`work` to be handed to a pool of threads: until one of them begins it, it waits in a queue."""
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
    """What `work` gives. Past `limit_s` it is cancelled, abandoned where it does not heed that, and `timeout_error` is
    raised.

    `timeout_error` is the caller's own, so that it is never taken for a `TimeoutError` that the work raised. With a
    `clock`,
    time in a queue (`exclude_queue_time`) does not count.
    """
    if limit_s <= 0:
        work.close()
        raise timeout_error
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()
    guarded = _notify_when_done(work, woken)
    # The name under which it is told of, should it stay behind.
    cast("Any", guarded).__qualname__ = getattr(work, "__qualname__", "") or str(work)
    timer: asyncio.TimerHandle | None = None
    if clock is None:
        task, timer = spawn(guarded), loop.call_later(limit_s, _wake, woken)
    else:
        clock.start(limit_s, woken)
        before = _clock.set(clock)
        task = spawn(guarded)  # which takes the context along
        _clock.reset(before)
    try:
        await woken
        if not task.done():
            raise timeout_error
        if task.cancelled():  # by itself: this must not pass for a cancellation of whoever waits
            raise user_code.UserCodeError("it cancelled itself")
        return task.result()
    finally:
        if timer is not None:
            timer.cancel()
        elif clock is not None:
            clock.stop()
        if not task.done():
            await _cancel_and_wait(task, work)
        elif not task.cancelled():
            task.exception()  # heard, though whoever waits may have been cancelled in the same instant


def _wake(woken: asyncio.Future[None] | None) -> None:
    if woken is not None and not woken.done():
        woken.set_result(None)


async def _notify_when_done(work: Coroutine[Any, Any, T], woken: asyncio.Future[None]) -> T:
    """Wakes whoever waits when `work` ends: a callback of the task, or `asyncio.wait`, would take another turn of the
    loop. A `sys.exit()` in a task would end the loop, and the run with it."""
    task = asyncio.current_task()
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as fault:
        if user_code.is_closing(fault, task):
            raise
        raise user_code.as_exception(fault) from None
    finally:
        if not woken.done():
            woken.set_result(None)


async def _cancel_and_wait(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Cancels, and waits: to the end of the grace, though whoever waits be cancelled meanwhile, so that nothing is left
    at work that is not counted."""
    loop = asyncio.get_running_loop()
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # whatever it says now is too late
    until = loop.time() + GRACE_S
    cancelled = False
    while not task.done() and (left_s := until - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left_s)
        except asyncio.CancelledError:
            cancelled = True
    if task.done():
        work.close()  # for the case that it was never begun: it would complain of that
    else:
        unhide_task(task)  # no longer ours
        _abandon(getattr(work, "__qualname__", str(work)), "does not heed its cancellation")
    if cancelled:
        raise asyncio.CancelledError


async def call_in_thread(work: Callable[[], T], *, name: str = "blocking work") -> T:
    """What blocking `work` gives, from a thread of its own.

    The loop's shared threads are few: there, calls that hang keep out all others, and calls that queue are late before
    they begin. A thread nobody waits for any more is left behind and counted under `name`; it holds up neither the loop
    nor the way out.
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
    thread = threading.Thread(target=run, name="toolwise-work", daemon=True)
    thread.start()
    try:
        return await given
    except asyncio.CancelledError:
        if given.cancelled() and thread.is_alive():
            _abandon(name, "cannot be stopped in its thread")
        raise


async def gather_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. A fault, or a cancellation, is raised only after every piece of work has come to its end:
    a plain `gather` would leave the others running."""
    begun = list(works)
    if len(begun) == 1:  # the most usual case, at no cost
        return [await begun[0]]
    tasks = [spawn(user_code.await_user_code(work)) for work in begun]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for work in begun:
            work.close()  # for those that a cancellation kept from beginning: they would complain of that
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but it ends: a task that does not heed its cancellation is left behind after `GRACE_S`, and a
    thread that somebody's `asyncio.to_thread` hangs in is not waited for. And it ends no earlier than `work`, whatever
    other people's tasks do to the loop; only the user's Ctrl-C ends it."""

    async def whole() -> T:
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
            return runner.run(whole())
        finally:
            for task in all_tasks(loop):  # what is left is asyncio's to end
                unhide_task(task)


def _forbid_loop_stop(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
    stop = loop.stop

    def refuse() -> None:
        if not main.done():
            raise RuntimeError("the event loop is the run's: it must not be stopped")
        stop()

    with suppress(AttributeError):  # a loop that is not written in Python: what stops it is met below
        cast("Any", loop).stop = refuse


def _survive_task_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Other people's tasks that raise `SystemExit` or `KeyboardInterrupt` make asyncio leave its loop: back in."""
    leave = loop.run_until_complete

    def run_until_complete(future: Any) -> Any:
        main = asyncio.ensure_future(future, loop=loop)
        while True:
            try:
                return leave(main)
            except BaseException as fault:
                if main.done() or loop.is_closed() or user_code.is_interrupt(fault):
                    raise
                log.warning("a task of other people's code raised %s: the run goes on", user_code.describe(fault))

    with suppress(AttributeError):
        cast("Any", loop).run_until_complete = run_until_complete


async def _cancel_all_tasks() -> None:
    """Ends all other tasks of the loop, or takes them off its books."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    if tasks := all_tasks() - {me}:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=GRACE_S)
    closing = spawn(loop.shutdown_asyncgens())
    await asyncio.wait({closing}, timeout=GRACE_S)
    for task in all_tasks() - {me}:
        _abandon(getattr(task.get_coro(), "__qualname__", repr(task)), "does not heed its cancellation")
        unregister_task(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        _abandoned_tasks.append(task)


class _ThreadPerCallExecutor(ThreadPoolExecutor):
    """A daemon thread a call: those of the standard library are few, and waited for at the end of the program."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as fault:
                future.set_exception(fault)

        threading.Thread(target=call, name="toolwise-work", daemon=True).start()
        return future
