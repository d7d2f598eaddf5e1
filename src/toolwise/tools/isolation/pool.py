"""Warm worker processes for tools: by module, as many as their calls need, killed with whoever is cancelled.

Callers wait on any event loop, one loop after the other or several at once; none of them is ever blocked, and none is
charged for the wait. `limit` bounds the calls that compute at once: on two cores sixty-four computations are each late,
one after the other none is. A call that sleeps, as most that block do, takes no core: others are let in beside it, each
in a process of its own, up to `most`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from toolwise.tools.isolation.places import Place, Target
from toolwise.tools.isolation.roster import LOOK_S, Roster
from toolwise.tools.isolation.workers import LOAD_S, LoadFault, NeverReached, NoRoomLeft, ToolDied, ToolFault, Worker
from toolwise.tools.isolation.zygote import AVAILABLE
from toolwise.waiting import queueing

MOST = 256
"""Processes at once, however slow their calls are, where the limit of open files allows as many."""
DESCRIPTORS = 5
"""What a worker takes of the trainer's open files: its channel, its output, its life, its end, and one to spare."""
DESCRIPTORS_LEFT = 256
"""Left to the rest of the trainer: checkpoints, connections, the sandbox of rewards."""
ATTEMPTS = 3
"""Of a call whose process is gone before the call has reached it."""
PAUSE_S = 0.25
"""How long no process is started after the system had no room for one."""
REAP_S = 1.0
"""How often idle workers are looked at."""
FREE_S = LOAD_S + 30.0
"""How long a rollout's own tool waits for a process where `most` are in use."""


def default_limit() -> int:
    """How many calls compute at once: TOOLWISE_TOOL_WORKERS, or four a core up to 32."""
    with suppress(ValueError):
        return max(1, int(os.environ.get("TOOLWISE_TOOL_WORKERS", "")))
    return min(32, 4 * (os.cpu_count() or 1))


def default_most() -> int:
    """How many processes fit the limit of open files (`ulimit -n`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(MOST, (soft - DESCRIPTORS_LEFT) // DESCRIPTORS)


class _Waiter:
    """Somebody who needs a worker, and the loop in which they wait. `keeps`: for as long as a rollout lasts."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.worker: Worker | None = None
        self.fault: ToolDied | None = None
        self.keeps = keeps
        self.since = time.monotonic()
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

    The first process of a place loads it and becomes its zygote: all others are forked from it. Where a module cannot
    be shared (`forking.can_be_forked`) each worker loads it anew, and there are at most `limit` beside slow calls.
    """

    def __init__(self, limit: int | None = None, most: int | None = None) -> None:
        self.limit = limit if limit is not None else default_limit()
        self.most = max(most if most is not None else default_most(), self.limit)
        self.killed = 0
        """How many were ended in the middle of a call, or died there."""
        self._start_over()

    def _start_over(self) -> None:
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        """Set while callers wait whom nobody serves yet."""
        self._watching = False
        self._roster = Roster()
        self._waiting: dict[Place, deque[_Waiter]] = {}
        self._unburied: set[Worker] = set()
        self._paused_until = 0.0
        self.closed = False

    async def run(
        self, target: Target, parameters: dict[str, Any], kwargs: dict[str, Any] | None = None
    ) -> tuple[str, float | None, dict[str, Any]]:
        """What `target`, a function tool, gives for the model's arguments and the task's own."""
        question = {"call": target.name, "parameters": parameters, "kwargs": kwargs or {}}
        for attempt in range(ATTEMPTS):
            try:
                async with self._worker(target.place) as worker:
                    return read_result(await worker.ask(question))
            except NeverReached:
                if attempt + 1 == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _worker(self, place: Place) -> AsyncIterator[Worker]:
        worker = await self._get(place)
        try:
            yield worker
        except ToolFault:  # the tool's own: its process is as good as before
            self._put_back(worker)
            raise
        except BaseException as fault:
            self.killed += not isinstance(fault, NeverReached)
            self.end(worker)
            raise
        self._put_back(worker)

    async def take(self, place: Place) -> Worker:
        """A worker to keep for as long as a rollout lasts: not one of `limit`, but one of `most`. `end` it."""
        try:
            async with asyncio.timeout(FREE_S):
                return await self._get(place, keeps=True)
        except TimeoutError:
            raise ToolDied(
                f"none of the {self.most} worker processes was free within {FREE_S:g} s, as other rollouts keep "
                "theirs: lower rollout.max_concurrent"
            ) from None

    async def _get(self, place: Place, *, keeps: bool = False) -> Worker:
        roster = self._roster
        with self._lock:
            if self.closed:
                raise ToolDied("the workers of the tools are closed")
            waiting = self._waiting.setdefault(place, deque())
            free = not waiting and roster.counted() < self.limit
            worker = self._ready(place) if free else None
            if worker is not None:  # the most usual case
                (roster.kept if keeps else roster.busy).add(worker)
                return worker
            waiter = _Waiter(keeps=keeps)
            waiting.append(waiter)
            self._admit()
        try:
            with queueing():
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

    def _ready(self, place: Place) -> Worker | None:
        """One that rests. Who was killed meanwhile is not handed out."""
        idle = self._roster.idle.get(place)
        while idle:
            worker = idle.pop()
            if worker.is_ready():
                return worker
            self._end_idle(worker)
        return None

    def end(self, worker: Worker) -> None:
        worker.kill()
        with self._lock:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        """Another comes up where somebody waits, or where this was the last of its place."""
        place, worked = worker.place, self._roster.works(worker)
        self._roster.drop(worker)
        if worked and not self.closed and not self._roster.held(place) and self._has_room(place):
            self._start(place)
        self._admit()

    def _put_back(self, worker: Worker) -> None:
        with self._lock:
            if self._roster.drop(worker):  # else it died meanwhile
                self._rest(worker)
                self._admit()

    def _rest(self, worker: Worker) -> None:
        self._roster.rest(worker)
        if worker.zygote is None and self._roster.unshared() > self.limit and not self._waiting.get(worker.place):
            self._end_idle(worker)

    # Who is next.

    def _admit(self) -> None:
        """Gives workers to callers as far as the limit goes, and starts some for those who wait. The module that has
        the fewest at work comes first: one that is always wanted does not keep out the others."""
        idle, refused = self._roster.idle, set[Place]()
        while not self.closed:
            free = self._roster.counted() < self.limit
            waiting = [place for place, waiters in self._waiting.items() if waiters and place not in refused]
            places = [place for place in waiting if (free and idle.get(place)) or self._wants(place, free)]
            if not places:
                break
            place = min(places, key=lambda place: (self._roster.at_work(place), self._waiting[place][0].since))
            worker = self._ready(place) if free else None
            if worker is not None:
                self._hand_on(worker)
            elif self._has_room(place) or self._make_room(place):
                self._start(place)
            else:
                refused.add(place)
        self._look_after()

    def _wants(self, place: Place, free: bool) -> bool:
        """Whether another process of it is to come up for its callers; `free`: whether it could work at once.

        The first one comes up alone, since others are forked from it. Where calls turn out to sleep, others come up
        ahead of their callers, to be ready when these are let in.
        """
        roster = self._roster
        waiting, coming = len(self._waiting[place]), roster.coming_for(place)
        if place in roster.zygotes:
            ready = coming + len(roster.idle.get(place, ()))
            return ready < waiting and ready + roster.crowd(place) < self.limit
        known = not AVAILABLE or place in roster.unshared_places
        return free and waiting > coming and (known or not coming)

    def _hand_on(self, worker: Worker) -> None:
        waiting = self._waiting.get(worker.place)
        while waiting:
            waiter = waiting.popleft()
            if waiter.give(worker):
                (self._roster.kept if waiter.keeps else self._roster.busy).add(worker)
                return
        self._rest(worker)

    def _has_room(self, place: Place) -> bool:
        full = place in self._roster.unshared_places and self._roster.unshared() >= self.limit
        return not full and not self._is_full()

    def _is_full(self) -> bool:
        return self._roster.up() >= self.most or time.monotonic() < self._paused_until

    def _make_room(self, place: Place) -> bool:
        """Ends an idle worker of another place."""
        found = self._roster.longest_idle(besides=place, unshared=not self._is_full())
        if found is not None:
            self._end_idle(found)
        return found is not None

    def _end_idle(self, worker: Worker) -> None:
        self._roster.drop(worker)
        worker.kill()

    # Processes that come and go.

    def _start(self, place: Place) -> None:
        worker = Worker(place, self._came_up, self._gone, self._roster.zygote_of(place))
        self._roster.coming.add(worker)
        self._unburied.add(worker)

    def _came_up(self, worker: Worker) -> None:
        with self._lock:
            if worker in self._roster.coming:
                self._roster.coming.discard(worker)
                self._roster.killed_coming.pop(worker.place, None)
                if not self._roster.found(worker):
                    self._rest(worker)
                self._admit()

    def _gone(self, worker: Worker, fault: ToolDied | None) -> None:
        with self._lock:
            self._unburied.discard(worker)
            roster = self._roster
            if worker in roster.coming and fault is not None and not roster.comes_again(worker):
                self._tell(worker.place, fault)
            self._replace(worker)

    def _tell(self, place: Place, fault: ToolDied) -> None:
        """Why no worker came up: to one of those who wait for it, or to all where the next would not come up either;
        to nobody where it would as soon as another has ended."""
        waiting = self._waiting.get(place) or deque()
        if isinstance(fault, NoRoomLeft) and self._roster.up() > 1:
            self._paused_until = time.monotonic() + PAUSE_S
            return
        for _ in range(len(waiting) if isinstance(fault, LoadFault) else min(1, len(waiting))):
            waiting.popleft().give(None, fault)

    def _look_after(self) -> None:
        """Has a thread look at calls while others wait, and at workers that nobody needs."""
        if any(self._waiting.values()):
            self._wanted.set()
        if not self._watching and not self.closed and (self._wanted.is_set() or self._roster.rests()):
            self._watching = True
            threading.Thread(target=self._watch, args=(self._lock,), name="toolwise-tool-pool", daemon=True).start()

    def _watch(self, lock: threading.Lock) -> None:
        while True:
            if self._wanted.wait(REAP_S):
                time.sleep(LOOK_S)
            with lock:
                self._roster.look(time.monotonic())
                for worker in self._roster.expired(time.monotonic()):
                    self._end_idle(worker)
                self._wanted.clear()
                self._admit()
                if self.closed or not (self._wanted.is_set() or self._roster.rests()):
                    self._watching = False
                    return

    def pids(self) -> list[int]:
        """The workers that are up now, without the zygotes."""
        with self._lock:
            zygotes = {worker for worker, _ in self._roster.zygotes.values()}
            return [worker.pid for worker in self._unburied - zygotes if worker.pid is not None]

    def close(self) -> None:
        """Ends every worker, also one in the middle of a call: its caller is told that it died."""
        with self._lock:
            self.closed = True
            zygotes = {worker for worker, _ in self._roster.zygotes.values()}
            workers = list(self._unburied)
            waiting = [waiter for waiters in self._waiting.values() for waiter in waiters]
            self._waiting.clear()
            for waiter in waiting:
                waiter.give(None, ToolDied("the workers of the tools were closed"))
        until = time.monotonic() + 2.0
        # Zygotes last: they say how the others ended.
        for group in ([w for w in workers if w not in zygotes], zygotes):
            for worker in group:
                worker.kill()
            for worker in group:
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
