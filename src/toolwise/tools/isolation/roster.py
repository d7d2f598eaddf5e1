"""Which worker processes there are and what each is at; for `pool.py`, under its lock."""

from __future__ import annotations

import time
from collections.abc import Iterator

from toolwise.tools.isolation.places import Place
from toolwise.tools.isolation.workers import Worker
from toolwise.tools.isolation.zygote import Zygote

LOOK_S = 0.05
"""How often calls are looked at while others wait: one that sleeps takes no core, and is not counted meanwhile."""
SLOW_S = 1.0
"""The same for a worker that shares no memory, of which there should be few: one that takes longer is not counted."""
SPIN_S = 10.0
"""A call that computes for longer may as well hang: it keeps nobody out any more."""
MOST_LOST = 3
"""So many zygotes, or workers that come up, may be killed before the module is taken to be the cause."""
IDLE_S = 30.0
"""How long a worker that nobody needs stays up."""
IDLE_LOADED_S = 300.0
"""The same for a process that would have to load its module again: a zygote, or a worker that shares nothing."""


class Roster:
    """Every worker is in one of `coming`, `busy`, `slow`, `kept`, `idle`, or is the zygote of its place."""

    def __init__(self) -> None:
        self.coming: set[Worker] = set()
        self.busy: set[Worker] = set()
        """At work, and counted against the limit."""
        self.slow: set[Worker] = set()
        """At work and not counted: they sleep, or take too long."""
        self.kept: set[Worker] = set()
        """A rollout's own."""
        self.idle: dict[Place, list[Worker]] = {}
        self.zygotes: dict[Place, tuple[Worker, Zygote]] = {}
        self.unshared_places: set[Place] = set()
        """Places that each worker loads for itself."""
        self.killed_coming: dict[Place, int] = {}
        """How many were killed while they came up, since one has."""
        self._lost_zygotes: dict[Place, int] = {}
        self._used: dict[Worker, float] = {}
        """When an idle worker, or a zygote, was last of use."""

    def found(self, worker: Worker) -> bool:
        """Takes in what a worker that came up says of its place; True where it is the place's zygote from now on."""
        if worker.zygote is not None:
            return False
        if worker.forks and worker.place not in self.zygotes:
            try:
                self.zygotes[worker.place] = (worker, worker.become_zygote())
            except OSError:  # it is dying
                self.unshared_places.add(worker.place)
            else:
                self._used[worker] = time.monotonic()
            return True
        if not worker.forks:
            self.unshared_places.add(worker.place)
        return False

    def lost_zygote(self, worker: Worker) -> bool:
        """Whether a worker did not come up because its zygote does not fork: another takes its place, and where that
        happens again and again each worker loads for itself."""
        if worker.zygote is None or not worker.zygote.gone:
            return False
        held, zygote = self.zygotes.get(worker.place, (None, None))
        if zygote is worker.zygote and held is not None:
            del self.zygotes[worker.place]
            self._used.pop(held, None)
            self._lost_zygotes[worker.place] = self._lost_zygotes.get(worker.place, 0) + 1
            if self._lost_zygotes[worker.place] >= MOST_LOST:
                self.unshared_places.add(worker.place)
        return True

    def comes_again(self, worker: Worker) -> bool:
        """Whether another is to come up for one that did not, as its zygote was gone or somebody killed it: that is not
        its place's fault, unless it happens again and again."""
        if self.lost_zygote(worker):
            return True
        count = self.killed_coming.get(worker.place, 0) + 1
        self.killed_coming[worker.place] = count
        return worker.was_killed and count < MOST_LOST

    def zygote_of(self, place: Place) -> Zygote | None:
        worker, zygote = self.zygotes.get(place, (None, None))
        if worker is not None:
            self._used[worker] = time.monotonic()
        return zygote

    def rest(self, worker: Worker) -> None:
        self.idle.setdefault(worker.place, []).append(worker)
        self._used[worker] = time.monotonic()

    def drop(self, worker: Worker) -> bool:
        """Whether it was there until now, other than as a zygote."""
        self._used.pop(worker, None)
        for group in (self.coming, self.busy, self.slow, self.kept):
            if worker in group:
                group.discard(worker)
                return True
        idle = self.idle.get(worker.place, [])
        if worker in idle:
            idle.remove(worker)
            return True
        held, _ = self.zygotes.get(worker.place, (None, None))
        if held is worker:
            del self.zygotes[worker.place]
        return False

    def look(self, now: float) -> None:
        """Sorts those at work into `busy` and `slow`."""
        for worker in (*self.busy, *self.slow):
            counts, doesnt = (self.busy, self.slow) if _counts(worker, now) else (self.slow, self.busy)
            doesnt.discard(worker)
            counts.add(worker)

    def expired(self, now: float) -> list[Worker]:
        """Those that nobody has needed for too long."""
        return [
            worker
            for worker, used in self._used.items()
            if now - used > (IDLE_S if worker.zygote is not None else IDLE_LOADED_S)
            and not (self._is_zygote(worker) and self.held(worker.place))
        ]

    def longest_idle(self, *, besides: Place, unshared: bool) -> Worker | None:
        """Of another place; `unshared`: among those that share no memory."""
        others = (worker for worker in self._all_idle() if worker.place != besides)
        idle = (worker for worker in others if not unshared or worker.zygote is None)
        return min(idle, key=lambda worker: self._used[worker], default=None)

    def rests(self) -> bool:
        return bool(self._used)

    def counted(self) -> int:
        """Those that compute, or load a module."""
        return len(self.busy) + sum(worker.zygote is None for worker in self.coming)

    def up(self) -> int:
        return len(self.coming) + len(self.busy) + len(self.slow) + len(self.kept) + sum(map(len, self.idle.values()))

    def unshared(self) -> int:
        """Workers without a zygote that are idle, or count."""
        return sum(worker.zygote is None for group in (self.coming, self.busy, self._all_idle()) for worker in group)

    def coming_for(self, place: Place) -> int:
        return sum(worker.place == place for worker in self.coming)

    def works(self, worker: Worker) -> bool:
        return worker in self.busy or worker in self.slow or worker in self.kept

    def crowd(self, place: Place) -> int:
        """Those of a place that compute; none where its calls are known to sleep."""
        if any(worker.place == place for worker in self.slow):
            return 0
        return sum(worker.place == place for worker in self.busy)

    def at_work(self, place: Place) -> int:
        groups = (self.coming, self.busy, self.slow, self.kept)
        return sum(worker.place == place for group in groups for worker in group)

    def held(self, place: Place) -> int:
        return self.at_work(place) + len(self.idle.get(place, ()))

    def _all_idle(self) -> Iterator[Worker]:
        return (worker for workers in self.idle.values() for worker in workers)

    def _is_zygote(self, worker: Worker) -> bool:
        return any(worker is zygote for zygote, _ in self.zygotes.values())


def _counts(worker: Worker, now: float) -> bool:
    age = now - worker.asked_at if worker.asked_at is not None else 0.0
    if worker.zygote is None:
        return age < SLOW_S
    return age < LOOK_S / 2 or (age < SPIN_S and worker.computes())
