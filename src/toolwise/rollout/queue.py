"""Between rollouts and training: complete groups, a bounded number of them, none staler than allowed.

Staleness is bounded by admission and not by throwing work away. An update uses `per_update` groups, so the groups that
the next v updates will use are known in advance: the k-th group to be admitted is learned from at version
k // per_update at the latest. It is let in only once that is at most `max_staleness` ahead of the current version.
Groups that were taken and not learned from give their place back. Given out as they finish, a slow group could be
passed by for ever: a faster one waits where the slow one will need its place.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from toolwise.errors import ToolwiseError

T = TypeVar("T")
Order = Literal["admitted", "finished"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to make one group: its number, and the policy's version when it was given."""

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Delivery(Generic[T]):
    """A complete group as the trainer takes it."""

    ticket: Ticket
    group: T
    staleness: int
    """Updates made between the group's admission and now."""


class RolloutQueue(Generic[T]):
    """`admit` before a group is begun, `put` when it is complete, `take` to learn from it, `advance` after the update,
    which takes `per_update` groups.

    `capacity` bounds the groups that are under way or waiting. `order` gives them out as they were admitted, or as they
    were finished. One producer's fault is passed to the trainer by `fail`.
    """

    def __init__(
        self, *, per_update: int, capacity: int | None = None, max_staleness: int = 0, order: Order = "admitted"
    ) -> None:
        if per_update < 1 or max_staleness < 0 or (capacity is not None and capacity < 1):
            raise ToolwiseError("a queue needs per_update and capacity of 1 or more, and a max_staleness of 0 or more")
        self.per_update, self.max_staleness, self.order = per_update, max_staleness, order
        self.capacity = capacity if capacity is not None else per_update * (1 + max_staleness)
        self.version = 0
        self._admitted = 0
        self._returned = 0
        self._in_progress: dict[int, Ticket] = {}
        self._complete: dict[int, tuple[Ticket, T]] = {}
        self._next = 0
        self._remaining = per_update
        """Groups that the coming update still wants."""
        self._skipped: set[int] = set()
        self._fault: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def in_progress(self) -> int:
        return len(self._in_progress)

    @property
    def waiting(self) -> int:
        """Complete groups that nobody has taken yet."""
        return len(self._complete)

    @property
    def _can_admit(self) -> bool:
        fresh = self._admitted - self._returned < (self.version + 1 + self.max_staleness) * self.per_update
        return fresh and self.in_progress + self.waiting < self.capacity

    async def admit(self) -> Ticket:
        """Waits until a group that is begun now will be fresh enough when it is learned from."""
        await self._until(lambda: self._can_admit)
        ticket = Ticket(self._admitted, self.version)
        self._admitted += 1
        self._in_progress[ticket.number] = ticket
        return ticket

    def put(self, ticket: Ticket, group: T) -> None:
        """A complete group. Each ticket brings one, once."""
        self._remove_ticket(ticket)
        self._complete[ticket.number] = (ticket, group)
        self._wake_waiters()

    def withdraw(self, ticket: Ticket) -> None:
        """The group cannot be had: its place is free again."""
        self._remove_ticket(ticket)
        self._skipped.add(ticket.number)
        self._returned += 1
        self._wake_waiters()

    def fail(self, fault: BaseException) -> None:
        """No more groups will come: whoever waits for one hears why."""
        self._fault = fault
        self._wake_waiters()

    async def take(self, count: int) -> list[Delivery[T]]:
        """`count` complete groups, as soon as there are so many."""
        if count > min(self._remaining, self.capacity):
            raise ToolwiseError(
                f"{count} groups at once never come: the update wants {self._remaining} more, and {self.capacity} "
                f"fit in"
            )
        await self._until(lambda: len(self._ready_numbers(count)) == count or self._fault is not None)
        numbers = self._ready_numbers(count)
        if len(numbers) < count:
            assert self._fault is not None
            raise self._fault
        taken = [self._complete.pop(number) for number in numbers]
        self._remaining -= count
        if self.order == "admitted":
            self._next = max([self._next, *(number + 1 for number in numbers)])
            self._skipped = {number for number in self._skipped if number >= self._next}
        self._wake_waiters()
        return [Delivery(ticket, group, self.version - ticket.version) for ticket, group in taken]

    def return_unused(self, count: int) -> None:
        """Of what was taken, so many groups were not learned from: as many more may come for this update."""
        self._returned += count
        self._remaining += count
        self._wake_waiters()

    def advance(self) -> None:
        """The policy has been updated."""
        self.version += 1
        self._remaining = self.per_update
        self._wake_waiters()

    def state_dict(self) -> dict[str, int]:
        """Between updates. Groups under way or waiting are not in it: whoever resumes begins them again."""
        unfinished = self.in_progress + self.waiting
        return {
            "version": self.version,
            "admitted": self._admitted - unfinished,
            "given_back": self._returned,
            "per_update": self.per_update,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.version = state["version"]
        self._admitted = self._next = state["admitted"]
        # Past updates count as if they had used as many groups as the coming ones, which may be of another size.
        self._returned = state["given_back"] - self.version * (
            self.per_update - state.get("per_update", self.per_update)
        )

    def _ready_numbers(self, count: int) -> list[int]:
        if self.order == "finished":
            return self._ready_by_finish_order(count)
        found: list[int] = []
        number = self._next
        while len(found) < count and (number in self._complete or number in self._skipped):
            if number in self._complete:
                found.append(number)
            number += 1
        return found

    def _ready_by_finish_order(self, count: int) -> list[int]:
        """As they were finished, but for those whose place will be needed by others that grow too old before them."""
        tickets = [*self._in_progress.values(), *(ticket for ticket, _ in self._complete.values())]
        ages = Counter(self._updates_left(ticket) for ticket in tickets)
        spare, due = [], 0  # after how many more updates -> places until then, less the groups that must be out by then
        for updates in range(self.max_staleness):
            due += ages[updates]
            spare.append(self._remaining + updates * self.per_update - due)
        found: list[int] = []
        for number, (ticket, _) in self._complete.items():
            before = self._updates_left(ticket)
            if len(found) < count and min(spare[:before], default=1) > 0:
                found.append(number)
                spare[:before] = [places - 1 for places in spare[:before]]
        return found

    def _updates_left(self, ticket: Ticket) -> int:
        """How many updates a group may still miss."""
        return max(0, ticket.version + self.max_staleness - self.version)

    async def _until(self, ready: Callable[[], bool]) -> None:
        """First come, first served: those who wait are woken in order, and each looks again."""
        while not ready():
            woken = asyncio.get_running_loop().create_future()
            self._waiters.append(woken)
            try:
                await woken
            finally:
                self._waiters.remove(woken)

    def _wake_waiters(self) -> None:
        for listener in self._waiters:
            if not listener.done():
                listener.set_result(None)

    def _remove_ticket(self, ticket: Ticket) -> None:
        if self._in_progress.pop(ticket.number, None) is None:
            raise ToolwiseError(f"group {ticket.number} is not under way: a ticket brings one group, once")
