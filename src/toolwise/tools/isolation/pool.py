"""Warm worker processes for tools: by module, up to a limit, killed with whoever is cancelled, and replaced.

Callers wait on any event loop, one loop after the other or several at once; none of them is ever blocked.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from toolwise.tools.isolation.places import Place, Target
from toolwise.tools.isolation.workers import LoadFault, ToolDied, ToolFault, Worker

SLOW_S = 1.0
"""A call that takes longer waits for something, or hangs: it counts no more against the limit, and keeps no one out."""
MOST = 256
"""Processes at once, however slow their calls are."""


def default_limit() -> int:
    """How many calls run at once: TOOLWISE_TOOL_WORKERS, or four a core up to 32."""
    with suppress(ValueError):
        return max(1, int(os.environ.get("TOOLWISE_TOOL_WORKERS", "")))
    return min(32, 4 * (os.cpu_count() or 1))


class _Waiter:
    """Somebody who needs a worker, and the loop in which they wait."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.fault: ToolDied | None = None
        self._loop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self._loop.create_future()

    def give(self, worker: Worker | None, fault: ToolDied | None = None) -> bool:
        """False where the loop is closed, and nobody waits any more."""
        self.worker, self.fault = worker, fault
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            self.worker = None
            return False
        return True

    def _wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class Pool:
    """Hands out a worker to one caller at a time. Workers come up by themselves; callers only wait for one.

    So a caller whose deadline passes while a tool's module is still being imported does not end the import: the next
    caller finds it done.
    """

    def __init__(self, limit: int | None = None, most: int = MOST) -> None:
        self.limit = limit if limit is not None else default_limit()
        self.most = max(most, self.limit)
        self.killed = 0
        """How many were ended in the middle of a call, or died there."""
        self._start_over()

    def _start_over(self) -> None:
        self._lock = threading.Lock()
        self._coming: set[Worker] = set()
        self._idle: dict[Place, list[Worker]] = {}
        self._busy: set[Worker] = set()
        self._slow: set[Worker] = set()
        self._waiting: dict[Place, deque[_Waiter]] = {}
        self._unburied: set[Worker] = set()
        self.closed = False

    async def run(self, target: Target, parameters: dict[str, Any]) -> tuple[str, float | None, dict[str, Any]]:
        """What `target`, a function tool, gives for the model's arguments."""
        async with self._worker(target.place) as worker:
            slow = asyncio.get_running_loop().call_later(SLOW_S, self._let_others_in, worker)
            try:
                return read_result(await worker.ask({"call": target.name, "parameters": parameters}))
            finally:
                slow.cancel()

    @asynccontextmanager
    async def _worker(self, place: Place) -> AsyncIterator[Worker]:
        worker = await self._get(place)
        try:
            yield worker
        except ToolFault:  # the tool's own: its process is as good as before
            self._put_back(worker)
            raise
        except BaseException:
            self.killed += 1
            self.end(worker)
            raise
        self._put_back(worker)

    async def take(self, place: Place) -> Worker:
        """A worker to keep for as long as a rollout lasts: not one of `limit`, but one of `most`. `end` it."""
        worker = await self._get(place)
        self._let_others_in(worker)
        return worker

    async def _get(self, place: Place) -> Worker:
        with self._lock:
            if self.closed:
                raise ToolDied("the workers of the tools are closed")
            if idle := self._idle.get(place):
                worker = idle.pop()
                self._busy.add(worker)
                return worker
            waiter = _Waiter()
            self._waiting.setdefault(place, deque()).append(waiter)
            self._bring_up()
        try:
            await waiter.woken
        except BaseException:
            with self._lock, suppress(KeyError, ValueError):
                self._waiting[place].remove(waiter)
            if waiter.worker is not None:
                self._put_back(waiter.worker)
            raise
        if waiter.worker is None:
            raise waiter.fault or ToolDied("no worker came up")
        return waiter.worker

    def end(self, worker: Worker) -> None:
        worker.kill()
        with self._lock:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        """Another comes up where somebody waits, or where this was the last of its place."""
        worked = worker in self._busy or worker in self._slow
        self._drop(worker)
        if worked and not self.closed and self._counted() < self.limit and not self._held(worker.place):
            self._start(worker.place)
        self._bring_up()

    def _let_others_in(self, worker: Worker) -> None:
        with self._lock:
            if worker in self._busy:
                self._busy.discard(worker)
                self._slow.add(worker)
                self._bring_up()

    def _put_back(self, worker: Worker) -> None:
        with self._lock:
            if not self._drop(worker):
                return  # it died meanwhile
            needier = self._needier_than(worker.place)
            if self._counted() < self.limit and needier is None:
                self._hand_on(worker)
                return
            worker.kill()
            if needier is not None:
                self._start(needier)

    def _hand_on(self, worker: Worker) -> None:
        waiting = self._waiting.get(worker.place)
        while waiting:
            if waiting.popleft().give(worker):
                self._busy.add(worker)
                return
        self._idle.setdefault(worker.place, []).append(worker)

    def _needier_than(self, place: Place) -> Place | None:
        """A place whose callers wait while it has fewer workers than its share, and this one more."""
        others = [p for p, waiting in self._waiting.items() if waiting and p != place and not self._coming_for(p)]
        if not others or self._counted() + 1 < self.limit:
            return None
        share = max(1, self.limit // (len(others) + 1))
        here = self._held(place) + 1
        return next((p for p in others if not (held := self._held(p)) or held < share < here), None)

    def _bring_up(self) -> None:
        """Starts as many workers as there are callers waiting, and room for."""
        for place, waiting in self._waiting.items():
            missing = len(waiting) - self._coming_for(place)
            while missing > 0 and not self.closed and self._make_room():
                self._start(place)
                missing -= 1

    def _make_room(self) -> bool:
        if self._counted() < self.limit and self._counted() + len(self._slow) < self.most:
            return True
        for idle in self._idle.values():
            if idle:  # of another place: where somebody waits nobody is idle
                idle.pop(0).kill()
                return True
        return False

    def _start(self, place: Place) -> None:
        worker = Worker(place, self._came_up, self._gone)
        self._coming.add(worker)
        self._unburied.add(worker)

    def _came_up(self, worker: Worker) -> None:
        with self._lock:
            if worker in self._coming:
                self._coming.discard(worker)
                self._hand_on(worker)

    def _gone(self, worker: Worker, fault: ToolDied | None) -> None:
        with self._lock:
            self._unburied.discard(worker)
            waiting = self._waiting.get(worker.place)
            if worker in self._coming and fault is not None and waiting:
                for _ in range(len(waiting) if isinstance(fault, LoadFault) else 1):
                    waiting.popleft().give(None, fault)
            self._replace(worker)

    def _drop(self, worker: Worker) -> bool:
        """Whether it was one of ours until now."""
        for group in (self._coming, self._busy, self._slow):
            if worker in group:
                group.discard(worker)
                return True
        idle = self._idle.get(worker.place, [])
        if worker in idle:
            idle.remove(worker)
            return True
        return False

    def _counted(self) -> int:
        return len(self._coming) + len(self._busy) + sum(map(len, self._idle.values()))

    def _coming_for(self, place: Place) -> int:
        return sum(worker.place == place for worker in self._coming)

    def _held(self, place: Place) -> int:
        busy = sum(worker.place == place for group in (self._busy, self._slow) for worker in group)
        return self._coming_for(place) + busy + len(self._idle.get(place, ()))

    def pids(self) -> list[int]:
        """The processes that are up now."""
        with self._lock:
            return [worker.pid for worker in self._unburied if worker.pid is not None]

    def close(self) -> None:
        """Ends every worker, also one in the middle of a call: its caller is told that it died."""
        with self._lock:
            self.closed = True
            workers = list(self._unburied)
            waiting = [waiter for waiters in self._waiting.values() for waiter in waiters]
            self._waiting.clear()
            for waiter in waiting:
                waiter.give(None, ToolDied("the workers of the tools were closed"))
        for worker in workers:
            worker.kill()
        until = time.monotonic() + 2.0
        for worker in workers:
            worker.thread.join(max(0.0, until - time.monotonic()))

    def abandon(self) -> None:
        """In the child of a fork: the workers are the parent's. Lets go of them and starts with none."""
        for worker in self._unburied:
            worker.forget()
        closed = self.closed
        self._start_over()
        self.closed = closed


def read_result(value: Any) -> tuple[str, float | None, dict[str, Any]]:
    match value:
        case [str() as text, None | int() | float() as reward, dict() as info] if not isinstance(reward, bool):
            return text, reward, info
    raise ToolDied("the tool's process sent something else than what it was asked for")
