"""Virtual time for async code: hours pass in milliseconds, and a seed decides the order of tasks.

`simulate(work, seed=7)` runs a coroutine like `asyncio.run`, on a clock that jumps to the next timer as soon as no task
is ready. The same seed gives the same schedule, so a race found once can be reproduced.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from toolwise.concurrency.tasks import all_tasks

T = TypeVar("T")

MAX_ROUNDS_PER_INSTANT = 100_000
"""More loop iterations without time advancing count as a busy loop."""


class Deadlock(RuntimeError):  # noqa: N818  it is one
    """No task is ready and no timer is set, or tasks spin while time does not advance; the message names the tasks."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on simulated time. It has no sockets, threads or processes: those run on real time.

    With a `seed`, tasks that are ready in the same iteration run in random order, as do timers due at the same time:
    asyncio guarantees no order there. Plain callbacks keep their order. Timers fire up to `jitter_s` late, as on a busy
    machine.
    """

    virtual_time = True
    """Checked by `toolwise.concurrency.deadlines.in_virtual_time`."""

    def __init__(self, seed: int | None = None, *, jitter_s: float = 0.0) -> None:
        super().__init__()
        self._virtual_now = 0.0
        self._rounds = 0
        self._order_rng = random.Random(seed) if seed is not None else None
        self._jitter_rng = random.Random(seed or 0)
        self.jitter_s = jitter_s
        self.stalled_s = 0.0

    def time(self) -> float:
        return self._virtual_now

    def stall(self, seconds: float) -> None:
        """Advance time without running other tasks, like a tool that blocks the loop."""
        self._virtual_now += seconds
        self.stalled_s += seconds

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> asyncio.TimerHandle:
        if self.jitter_s:
            when += self._jitter_rng.uniform(0.0, self.jitter_s)
        return super().call_at(when, callback, *args, **kwargs)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("threads cannot run in virtual time: use async code in the simulation")

    # Hooks that BaseEventLoop leaves to socket-based loops, and a replacement of its single iteration.

    def _ignore(self, *arguments: Any) -> None:
        return

    _process_events = _write_to_self = _timer_handle_cancelled = _ignore

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            _pop_timer(timers)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._advance_time(timers)
        self._rounds += 1
        if self._rounds > MAX_ROUNDS_PER_INSTANT:
            raise Deadlock(
                f"time does not advance at {self._virtual_now:g} s while these tasks are busy: {self._waiting_tasks()}"
            )
        due = []
        while timers and timers[0]._when <= self._virtual_now:
            due.append(_pop_timer(timers))
        if self._order_rng is not None:
            self._order_rng.shuffle(due)
        ready.extend(due)
        if self._order_rng is not None:
            indices = [index for index, handle in enumerate(ready) if _is_task(handle)]
            handles = [ready[index] for index in indices]
            self._order_rng.shuffle(handles)
            for index, handle in zip(indices, handles, strict=True):
                ready[index] = handle
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _advance_time(self, timers: list[Any]) -> None:
        if not timers:
            raise Deadlock(f"at {self._virtual_now:g} s no timer is left to wake these tasks: {self._waiting_tasks()}")
        if timers[0]._when > self._virtual_now:
            self._virtual_now = timers[0]._when
            self._rounds = 0

    def _waiting_tasks(self) -> str:
        return "; ".join(sorted(f"{_task_location(t)} ({t.get_name()})" for t in all_tasks(self))) or "no tasks"


def simulate(work: Coroutine[Any, Any, T], *, seed: int | None = None, jitter_s: float = 0.0) -> T:
    """Run `work` in virtual time and return its result. Raises `Deadlock` if it would wait for ever."""
    runner = asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, jitter_s=jitter_s))
    loop = runner.get_loop()
    try:
        return runner.run(work)
    finally:
        try:
            runner.close()
        except Deadlock:  # tasks ignored their cancellation: the first error says more
            for task in all_tasks(loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # no warning on top


def _pop_timer(timers: list[Any]) -> Any:
    handle = heapq.heappop(timers)
    handle._scheduled = False
    return handle


def _is_task(handle: Any) -> bool:
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


def _task_location(task: asyncio.Task[Any]) -> str:
    """The task's coroutine, and the innermost line outside asyncio that it waits in."""
    coroutine: Any = task.get_coro()
    location = name = getattr(coroutine, "__qualname__", str(coroutine))
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if not frame.f_globals.get("__name__", "").startswith("asyncio."):
            location = f"{coroutine.__qualname__}, line {frame.f_lineno}"
        coroutine = coroutine.cr_await
    return location if location.startswith(name) else f"{name} in {location}"
