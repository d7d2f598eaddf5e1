"""Queue between rollouts and training: holds a bounded number of complete groups, none staler than allowed.

Staleness is bounded by admission, not by discarding work. An update uses `per_update` groups, so the groups that the
next v updates will use are known in advance: the k-th admitted group is trained on at version k // per_update at the
latest. It is admitted only once that is at most `max_staleness` ahead of the current version. Groups that were taken
but not trained on give their slot back. In order of completion a slow group could be overtaken forever, so a faster
group waits when the slow one will need its slot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, Literal, TypeVar

from toolwise.errors import ToolwiseError

T = TypeVar("T")
Order = Literal["admitted", "finished"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to produce one group: its number, and the policy version at admission that its tokens come from."""

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Delivery(Generic[T]):
    """A complete group as the trainer receives it."""

    ticket: Ticket
    group: T
    staleness: int
    """Updates between the group's admission and now."""


class RolloutQueue(Generic[T]):
    """`admit` before starting a group, `put` when it is complete, `take` to train on it, `advance` after the update,
    which uses `per_update` groups.

    `capacity` bounds the groups in progress or waiting. `order` delivers them in order of admission or of completion.
    `fail` passes a producer's error to the trainer.
    """

    def __init__(
        self, *, per_update: int, capacity: int | None = None, max_staleness: int = 0, order: Order = "admitted"
    ) -> None:
        if per_update < 1 or max_staleness < 0 or (capacity is not None and capacity < 1):
            raise ToolwiseError("per_update and capacity must be at least 1, and max_staleness at least 0")
        self.per_update, self.max_staleness, self.order = per_update, max_staleness, order
        self.capacity = capacity if capacity is not None else per_update * (1 + max_staleness)
        self.version = self.published = 0
        """Updates, and those of them whose weights new tokens come from: admission counts these."""
        self._admitted = 0
        self._returned = 0
        self._in_progress: dict[int, Ticket] = {}
        self._complete: dict[int, tuple[Ticket, T]] = {}
        self._next = 0
        self._remaining = per_update
        """Groups that the coming update still needs."""
        self._fault: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def in_progress(self) -> int:
        return len(self._in_progress)

    @property
    def waiting(self) -> int:
        """Complete groups that have not been taken yet."""
        return len(self._complete)

    @property
    def _can_admit(self) -> bool:
        fresh = self._admitted - self._returned < (self.published + 1 + self.max_staleness) * self.per_update
        return fresh and self.in_progress + self.waiting < self.capacity

    async def admit(self) -> Ticket:
        """Wait until a group started now will be fresh enough when it is trained on."""
        await self._until(lambda: self._can_admit)
        return self._issue(self.published)

    async def admit_many(self, count: int, *, last_version: int, missing: int = 0) -> list[Ticket]:
        """Wait until `count` groups may start, the first of which the updates before `last_version` need. `missing`
        more count as if they had been admitted and used: those that a short batch lacks."""
        await self._until(lambda: self._can_admit_many(count, last_version, missing))
        self._returned -= missing
        return [self._issue(self.published) for _ in range(count)]

    def _can_admit_many(self, count: int, last_version: int, missing: int) -> bool:
        slots = count + missing
        fresh = self._admitted - self._returned + slots <= (self.published + 1 + self.max_staleness) * self.per_update
        unfinished = self.in_progress + self.waiting
        needed = (last_version - self.version - 1) * self.per_update + self._remaining
        return fresh and unfinished + count <= self.capacity and unfinished < needed

    async def settle(self, count: int, *, last_version: int, missing: int = 0) -> None:
        """Wait until every group that `admit_many` may admit now is complete."""
        await self._until(
            lambda: (
                self._fault is not None or not (self._in_progress or self._can_admit_many(count, last_version, missing))
            )
        )
        if self._fault is not None:
            raise self._fault

    def reissue(self, version: int) -> Ticket:
        """Admit a group again that was in progress or waiting when the state was saved; `version` is its ticket's."""
        return self._issue(version)

    def _issue(self, version: int) -> Ticket:
        ticket = Ticket(self._admitted, version)
        self._admitted += 1
        self._in_progress[ticket.number] = ticket
        return ticket

    def put(self, ticket: Ticket, group: T) -> None:
        """Add a complete group. Each ticket is good for one."""
        if self._in_progress.pop(ticket.number, None) is None:
            raise ToolwiseError(f"group {ticket.number} is not in progress: each ticket is good for one group")
        self._complete[ticket.number] = (ticket, group)
        self._wake_waiters()

    def fail(self, fault: BaseException) -> None:
        """No more groups will come: `take` raises `fault`."""
        self._fault = fault
        self._wake_waiters()

    async def take(self, count: int, *, missing: int = 0) -> list[Delivery[T]]:
        """Wait for `count` complete groups and return them; `missing` as in `admit_many`."""
        if count > min(self._remaining, self.capacity):
            raise ToolwiseError(
                f"cannot take {count} groups at once: the update needs {self._remaining} more, and the queue holds "
                f"{self.capacity}"
            )
        await self._until(lambda: len(self._ready_numbers(count)) == count or self._fault is not None)
        numbers = self._ready_numbers(count)
        if len(numbers) < count:
            assert self._fault is not None
            raise self._fault
        taken = [self._complete.pop(number) for number in numbers]
        self._remaining -= count + missing
        if self.order == "admitted":
            self._next += count
        self._wake_waiters()
        return [Delivery(ticket, group, self.version - ticket.version) for ticket, group in taken]

    def return_unused(self, count: int) -> None:
        """`count` of the taken groups were not trained on: as many more may come for this update."""
        self._returned += count
        self._remaining += count
        self._wake_waiters()

    def advance(self, *, publish: bool = True) -> None:
        """The policy has been updated. Without `publish`, tokens still come from older weights: no more groups may
        start than before, so updates go on only as long as those under way last."""
        self.version += 1
        self._remaining = self.per_update
        if publish:
            self.published = self.version
        self._wake_waiters()

    def publish(self) -> None:
        """New tokens come from the latest update."""
        self.published = self.version
        self._wake_waiters()

    def state_dict(self) -> dict[str, int]:
        """Call it between updates. Groups in progress or waiting are not included: a resumed run starts them again."""
        unfinished = self.in_progress + self.waiting
        return {
            "version": self.version,
            "admitted": self._admitted - unfinished,
            "given_back": self._returned,
            "per_update": self.per_update,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.version = self.published = state["version"]
        self._admitted = self._next = state["admitted"]
        # Past updates count as if they had used as many groups as the coming ones, whose size may differ.
        self._returned = state["given_back"] - self.version * (
            self.per_update - state.get("per_update", self.per_update)
        )

    def _ready_numbers(self, count: int) -> list[int]:
        if self.order == "finished":
            return self._ready_by_finish_order(count)
        return list(takewhile(self._complete.__contains__, range(self._next, self._next + count)))

    def _ready_by_finish_order(self, count: int) -> list[int]:
        """In order of completion, but without taking the slots of groups that become too stale first."""
        tickets = [*self._in_progress.values(), *(ticket for ticket, _ in self._complete.values())]
        deadlines = Counter(self._updates_left(ticket) for ticket in tickets)
        spare, due = [], 0  # after i more updates: slots until then, minus the groups that must be out by then
        for updates in range(self.max_staleness):
            due += deadlines[updates]
            spare.append(self._remaining + updates * self.per_update - due)
        ready: list[int] = []
        for number, (ticket, _) in self._complete.items():
            updates_left = self._updates_left(ticket)
            if len(ready) < count and min(spare[:updates_left], default=1) > 0:
                ready.append(number)
                spare[:updates_left] = [slots - 1 for slots in spare[:updates_left]]
        return ready

    def _updates_left(self, ticket: Ticket) -> int:
        """Number of updates a group may still miss."""
        return max(0, ticket.version + self.max_staleness - self.version)

    async def _until(self, ready: Callable[[], bool]) -> None:
        """First come, first served: waiters are woken in order, and each checks again."""
        while not ready():
            woken = asyncio.get_running_loop().create_future()
            self._waiters.append(woken)
            try:
                await woken
            finally:
                self._waiters.remove(woken)

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
