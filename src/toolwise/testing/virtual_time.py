"""Virtual time for whatever is async: hours pass in milliseconds, and a seed decides who goes first.

`simulate(work, seed=7)` runs a coroutine as `asyncio.run` does, on a clock that jumps to the next timer as soon as
nobody has anything to do. The same seed is the same schedule, so a race that was found once can be found again.
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
"""So many rounds in one instant are nobody's honest work."""


class Deadlock(RuntimeError):  # noqa: N818  it is one
    """Nothing is ready and no timer is set, or everybody is busy and time stands still; names the tasks that wait."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that makes its own time. It has no sockets, threads or processes: those could not keep step.

    With a `seed`, tasks that are ready in the same round go in random order, as do timers of the same instant: asyncio
    promises no order there. Plain callbacks keep theirs. Timers ring up to `jitter_s` late, as on a busy machine.
    """

    virtual_time = True
    """What `waiting.in_virtual_time` looks for."""

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
        """Time passes and nobody else gets a turn: what a tool does that blocks the loop."""
        self._virtual_now += seconds
        self.stalled_s += seconds

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, **more: Any
    ) -> asyncio.TimerHandle:
        late_s = self._jitter_rng.uniform(0.0, self.jitter_s) if self.jitter_s else 0.0
        return super().call_at(when + late_s, callback, *args, **more)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no thread can keep step with virtual time: give the simulation something async")

    # What BaseEventLoop leaves to those that wait for real sockets, and its one round, written anew.

    def _process_events(self, event_list: Any) -> None:
        return

    def _write_to_self(self) -> None:
        return

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
                f"time stands still at {self._virtual_now:g} s while these are busy: {self._waiting_tasks()}"
            )
        due = []
        while timers and timers[0]._when <= self._virtual_now:
            due.append(_pop_timer(timers))
        if self._order_rng is not None:
            self._order_rng.shuffle(due)
        ready.extend(due)
        self._shuffle_tasks(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return

    def _advance_time(self, timers: list[Any]) -> None:
        if not timers:
            raise Deadlock(
                f"at {self._virtual_now:g} s nothing is left that could wake anybody: {self._waiting_tasks()}"
            )
        if timers[0]._when > self._virtual_now:
            self._virtual_now = timers[0]._when
            self._rounds = 0

    def _shuffle_tasks(self, ready: Any) -> None:
        if self._order_rng is None:
            return
        places = [at for at, handle in enumerate(ready) if _is_task(handle)]
        handles = [ready[at] for at in places]
        self._order_rng.shuffle(handles)
        for at, handle in zip(places, handles, strict=True):
            ready[at] = handle

    def _waiting_tasks(self) -> str:
        names = sorted(f"{_task_location(task)} ({task.get_name()})" for task in all_tasks(self))
        return "; ".join(names) or "no task at all"


def simulate(work: Coroutine[Any, Any, T], *, seed: int | None = None, jitter_s: float = 0.0) -> T:
    """What `work` gives, in virtual time. Raises `Deadlock` where it would wait for ever."""
    runner = asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, jitter_s=jitter_s))
    loop = runner.get_loop()
    try:
        return runner.run(work)
    finally:
        try:
            runner.close()
        except Deadlock:  # those that do not heed their cancellation: the first word on it is the better one
            for task in all_tasks(loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # and the last one


def _pop_timer(timers: list[Any]) -> Any:
    handle = heapq.heappop(timers)
    handle._scheduled = False
    return handle


def _is_task(handle: Any) -> bool:
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


def _task_location(task: asyncio.Task[Any]) -> str:
    """The task's coroutine, and the innermost line of somebody's own that it waits in."""
    coroutine: Any = task.get_coro()
    place = name = getattr(coroutine, "__qualname__", str(coroutine))
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if not frame.f_globals.get("__name__", "").startswith("asyncio."):
            place = f"{coroutine.__qualname__}, line {frame.f_lineno}"
        coroutine = coroutine.cr_await
    return place if place.startswith(name) else f"{name} in {place}"
