"""The queue between rollouts and training: complete groups, a bounded number, none too stale, lost or duplicated."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import ToolwiseError
from toolwise.rollout.queue import Order, RolloutQueue, Ticket
from toolwise.testing.virtual_time import Deadlock, simulate

T = TypeVar("T")


def queue_of(per_update: int = 2, **more: Any) -> RolloutQueue[str]:
    return RolloutQueue(per_update=per_update, **more)


async def admit(queue: RolloutQueue[str], n: int) -> list[Ticket]:
    return [await queue.admit() for _ in range(n)]


async def is_waiting(work: Coroutine[Any, Any, T]) -> bool:
    """Whether it would block now; it is cancelled either way."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0.01)
    waits = not task.done()
    task.cancel()
    await asyncio.wait({task})
    return waits


def test_groups_come_in_the_order_of_their_admission() -> None:
    async def play() -> list[str]:
        queue = queue_of(3)
        tickets = await admit(queue, 3)
        for ticket in reversed(tickets):
            queue.put(ticket, f"group {ticket.number}")
        return [delivery.group for delivery in await queue.take(3)]

    assert simulate(play()) == ["group 0", "group 1", "group 2"]


def test_groups_come_as_they_are_finished_where_that_is_asked_for() -> None:
    async def play() -> list[str]:
        queue = queue_of(3, order="finished")
        tickets = await admit(queue, 3)
        for place in (2, 0, 1):
            queue.put(tickets[place], f"group {place}")
        return [delivery.group for delivery in await queue.take(3)]

    assert simulate(play()) == ["group 2", "group 0", "group 1"]


@pytest.mark.parametrize("order", ["admitted", "finished"])
def test_without_staleness_the_next_updates_groups_wait_for_the_update(order: Order) -> None:
    async def play() -> None:
        queue = queue_of(2, order=order, capacity=10)
        tickets = await admit(queue, 2)
        assert await is_waiting(queue.admit())
        for ticket in tickets:
            queue.put(ticket, "")
        await queue.take(2)
        assert await is_waiting(queue.admit())
        queue.advance()
        assert [t.version for t in await admit(queue, 2)] == [1, 1]

    simulate(play())


def test_staleness_lets_so_many_updates_groups_in_ahead() -> None:
    async def play() -> None:
        queue = queue_of(2, max_staleness=2)
        tickets = await admit(queue, 6)
        assert await is_waiting(queue.admit())
        for ticket in tickets:
            queue.put(ticket, "")
        ages = []
        for _ in range(3):
            ages += [delivery.staleness for delivery in await queue.take(2)]
            queue.advance()
        assert ages == [0, 0, 1, 1, 2, 2]

    simulate(play())


def test_capacity_counts_what_is_under_way_and_what_waits() -> None:
    async def play() -> None:
        queue = queue_of(2, max_staleness=3, capacity=3)
        tickets = await admit(queue, 3)
        assert (queue.in_progress, queue.waiting) == (3, 0)
        assert await is_waiting(queue.admit())
        queue.put(tickets[0], "")
        assert (queue.in_progress, queue.waiting) == (2, 1)
        assert await is_waiting(queue.admit())
        queue.put(tickets[1], "")
        await queue.take(2)
        assert len(await admit(queue, 2)) == 2
        assert await is_waiting(queue.admit())

    simulate(play())


def test_a_take_waits_for_the_slowest_of_its_groups() -> None:
    async def play() -> float:
        queue = queue_of(2)

        async def produce(nap_s: float) -> None:
            ticket = await queue.admit()
            await asyncio.sleep(nap_s)
            queue.put(ticket, "")

        producers = [asyncio.create_task(produce(nap_s)) for nap_s in (5.0, 1.0)]
        await queue.take(2)
        await asyncio.wait(producers)
        return asyncio.get_running_loop().time()

    assert simulate(play()) == 5.0


def test_a_fast_group_waits_where_a_slow_one_will_need_its_place() -> None:
    """One group per update, up to two updates old: when the fourth is admitted, the next two updates are full."""

    async def play() -> None:
        queue = queue_of(1, max_staleness=2, order="finished")
        first, second, third = await admit(queue, 3)
        queue.put(first, "first")
        await queue.take(1)
        queue.advance()
        (fourth,) = await admit(queue, 1)
        queue.put(fourth, "fourth")
        assert await is_waiting(queue.take(1))
        queue.put(third, "third")
        assert [d.group for d in await queue.take(1)] == ["third"]
        queue.advance()
        assert await is_waiting(queue.take(1))
        queue.put(second, "second")
        deliveries = await queue.take(1)
        assert [(d.group, d.staleness) for d in deliveries] == [("second", 2)]
        queue.advance()
        assert [(d.group, d.staleness) for d in await queue.take(1)] == [("fourth", 2)]

    simulate(play())


def test_groups_given_back_are_made_up_for_in_the_same_update() -> None:
    async def play() -> list[int]:
        queue = queue_of(2)
        for ticket in await admit(queue, 2):
            queue.put(ticket, "")
        await queue.take(2)
        assert await is_waiting(queue.admit())
        queue.return_unused(1)
        (ticket,) = await admit(queue, 1)
        assert await is_waiting(queue.admit())
        queue.put(ticket, "")
        return [delivery.staleness for delivery in await queue.take(1)]

    assert simulate(play()) == [0]


def test_a_ticket_brings_one_group_once() -> None:
    async def play() -> None:
        queue = queue_of(2)
        (ticket,) = await admit(queue, 1)
        queue.put(ticket, "")
        with pytest.raises(ToolwiseError, match="group 0 is not in progress"):
            queue.put(ticket, "")

    simulate(play())


def test_a_producers_fault_reaches_the_trainer_that_waits() -> None:
    async def play() -> None:
        queue = queue_of(1)

        async def produce() -> None:
            await queue.admit()
            await asyncio.sleep(1)
            queue.fail(OSError("no more tasks"))

        producer = asyncio.create_task(produce())
        with pytest.raises(OSError, match="no more tasks"):
            await queue.take(1)
        await producer

    simulate(play())


def test_what_was_whole_before_the_fault_is_still_given_out() -> None:
    async def play() -> None:
        queue = queue_of(1, max_staleness=1)
        first, _ = await admit(queue, 2)
        queue.put(first, "whole")
        queue.fail(OSError("no more tasks"))
        assert [delivery.group for delivery in await queue.take(1)] == ["whole"]
        queue.advance()
        with pytest.raises(OSError, match="no more tasks"):
            await queue.take(1)

    simulate(play())


def test_a_wait_that_is_cancelled_takes_nothing_with_it() -> None:
    async def play() -> list[str]:
        queue = queue_of(1)
        (ticket,) = await admit(queue, 1)
        taking, admitting = asyncio.create_task(queue.take(1)), asyncio.create_task(queue.admit())
        await asyncio.sleep(1)
        queue.put(ticket, "kept")
        for task in (taking, admitting):  # woken, and cancelled before they could check
            task.cancel()
        await asyncio.wait({taking, admitting})
        assert taking.cancelled()
        assert admitting.cancelled()
        return [delivery.group for delivery in await queue.take(1)]

    assert simulate(play()) == ["kept"]


@pytest.mark.parametrize(
    "given_", [{"per_update": 0}, {"per_update": 1, "capacity": 0}, {"per_update": 1, "max_staleness": -1}]
)
def test_a_queue_that_could_never_work_is_refused(given_: dict[str, int]) -> None:
    with pytest.raises(ToolwiseError, match="at least 1"):
        RolloutQueue(**given_)  # type: ignore[arg-type]


@pytest.mark.parametrize(("capacity", "count"), [(1, 2), (10, 3)], ids=["more than fit in", "more than an update"])
def test_more_than_can_ever_come_is_refused_and_not_waited_for(capacity: int, count: int) -> None:
    with pytest.raises(ToolwiseError, match=f"cannot take {count} groups at once"):
        simulate(queue_of(2, capacity=capacity).take(count))


def test_without_producers_a_trainer_waits_for_ever() -> None:
    with pytest.raises(Deadlock, match="RolloutQueue"):
        simulate(queue_of(1).take(1))


Naps = st.sampled_from([0.0, 0.1, 1.0, 7.0])


@settings(deadline=None, max_examples=150)
@given(
    per_update=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    spare=st.integers(0, 4),
    order=st.sampled_from(["admitted", "finished"]),
    makes=st.lists(Naps, min_size=1, max_size=12),
    learns=st.lists(Naps, min_size=1, max_size=5),
    producers=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_whatever_the_pace_the_bounds_hold_and_nothing_is_lost(
    per_update: int,
    max_staleness: int,
    spare: int,
    order: Order,
    makes: list[float],
    learns: list[float],
    producers: int,
    seed: int,
) -> None:
    capacity = per_update + spare

    async def play() -> None:
        queue: RolloutQueue[int] = RolloutQueue(
            per_update=per_update, capacity=capacity, max_staleness=max_staleness, order=order
        )
        put: list[int] = []
        taken: list[int] = []

        async def produce() -> None:
            while True:
                ticket = await queue.admit()
                assert queue.in_progress + queue.waiting <= capacity
                await asyncio.sleep(makes[ticket.number % len(makes)])
                put.append(ticket.number)
                queue.put(ticket, ticket.number)

        working = [asyncio.create_task(produce()) for _ in range(producers)]
        for nap_s in learns:
            deliveries = await queue.take(per_update)
            assert [d.group for d in deliveries] == [d.ticket.number for d in deliveries]
            assert all(d.staleness == queue.version - d.ticket.version <= max_staleness for d in deliveries)
            taken += [d.group for d in deliveries]
            await asyncio.sleep(nap_s)
            queue.advance()
        for task in working:
            task.cancel()
        await asyncio.wait(working)
        assert all(task.cancelled() for task in working)
        assert len(set(taken)) == len(taken) == per_update * len(learns)
        assert set(taken) <= set(put)
        assert queue.waiting == len(put) - len(taken)
        if order == "admitted":
            assert taken == sorted(taken)

    simulate(play(), seed=seed)


@pytest.mark.parametrize("now", [1, 2, 3, 7])
def test_a_resumed_queue_lets_in_one_update_s_groups_whatever_their_number_was(now: int) -> None:
    async def play() -> tuple[int, bool]:
        old = queue_of(2)
        for _ in range(10):
            for ticket in await admit(old, 2):
                old.put(ticket, "group")
            await old.take(2)
            old.advance()
        resumed = queue_of(now)
        resumed.load_state_dict(old.state_dict())
        return len(await admit(resumed, now)), await is_waiting(resumed.admit())

    assert simulate(play()) == (now, True)


def test_while_weights_are_held_back_updates_go_on_and_admission_does_not() -> None:
    """With two versions of staleness six groups may be admitted at version 0. Three updates use them; a fourth has to
    wait until the third's weights are published, and its groups are admitted then."""

    async def play() -> None:
        queue = queue_of(2, max_staleness=2, order="finished")
        tickets = await admit(queue, 6)
        assert await is_waiting(queue.admit())
        for ticket in tickets:
            queue.put(ticket, f"group {ticket.number}")
        for update in range(3):
            assert [delivery.staleness for delivery in await queue.take(2)] == [update, update]
            queue.advance(publish=False)
            assert await is_waiting(queue.admit())
        assert (queue.version, queue.published) == (3, 0)
        assert await is_waiting(queue.take(2))
        queue.publish()
        assert [ticket.version for ticket in await admit(queue, 6)] == [3] * 6
        assert await is_waiting(queue.admit())

    simulate(play())
