"""Gates admit up to their limit, first come first served; a waiter that is cancelled blocks no one."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.concurrency.limits import UNLIMITED, Gate, Limits, Slot
from toolwise.testing.virtual_time import simulate


async def pass_all(gate: Gate, naps: list[float]) -> tuple[list[int], int]:
    """The order in which they entered, and the maximum number inside at once."""
    inside, most = 0, 0
    order: list[int] = []

    async def one(number: int, nap_s: float) -> None:
        nonlocal inside, most
        async with gate:
            order.append(number)
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(nap_s)
            inside -= 1

    await asyncio.gather(*(one(number, nap_s) for number, nap_s in enumerate(naps)))
    return order, most


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.sampled_from([0.0, 0.1, 0.5]), max_size=12))
def test_so_many_at_a_time_in_the_order_they_came(limit: int, naps: list[float]) -> None:
    order, most = simulate(pass_all(Gate(limit), naps))
    assert most <= limit
    assert most == min(limit, len(naps)) or 0.0 in naps
    assert order == list(range(len(naps)))


def test_no_limit_lets_everybody_in() -> None:
    assert simulate(pass_all(UNLIMITED, [0.1] * 50))[1] == 50
    assert Limits().model is Limits().env is UNLIMITED


@pytest.mark.parametrize("limit", [0, -1])
def test_a_gate_that_lets_nobody_in_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="limit must be at least 1"):
        Gate(limit)


def test_whoever_fails_inside_leaves() -> None:
    async def fail_often(gate: Gate) -> None:
        for _ in range(5):
            with pytest.raises(OSError, match="broken"):
                async with gate:
                    raise OSError("broken")

    simulate(fail_often(Gate(1)))


def test_whoever_is_cancelled_while_waiting_takes_no_place() -> None:
    async def cancel(gate: Gate) -> None:
        async def wait() -> None:
            async with gate:
                raise AssertionError("nobody let me in")

        async with gate:
            waiting = [asyncio.create_task(wait()) for _ in range(3)]
            await asyncio.sleep(0.1)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
        async with gate:
            pass

    simulate(cancel(Gate(1)))


def test_a_place_can_be_given_up_by_somebody_else_and_only_once() -> None:
    async def release(gate: Gate) -> None:
        places = [Slot() for _ in range(3)]
        await places[0].acquire(gate)
        waiting = [asyncio.create_task(place.acquire(gate)) for place in places[1:]]
        await asyncio.sleep(1)
        assert not any(task.done() for task in waiting)
        for _ in range(3):
            places[0].release()
        await asyncio.sleep(1)
        assert sum(task.done() for task in waiting) == 1
        places[1].release()
        await asyncio.wait(waiting)

    simulate(release(Gate(1)))


def test_a_place_where_everybody_may_stand_is_no_place() -> None:
    async def take() -> None:
        place = Slot()
        await place.acquire(UNLIMITED)
        place.release()
        place.release()

    simulate(take())


def test_one_gate_serves_one_loop_after_another() -> None:
    gate = Gate(1)

    async def stay() -> None:
        await gate.enter()

    for _ in range(3):
        simulate(stay())
