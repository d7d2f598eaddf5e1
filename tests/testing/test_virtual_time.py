"""Virtual time: hours pass at once, the same seed gives the same schedule, and a deadlock names its tasks."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from toolwise.concurrency.deadlines import in_virtual_time
from toolwise.testing.virtual_time import Deadlock, VirtualLoop, simulate


async def order_of(n: int) -> list[int]:
    order: list[int] = []

    async def one(number: int) -> None:
        await asyncio.sleep(0)
        order.append(number)

    await asyncio.gather(*(one(number) for number in range(n)))
    return order


async def for_ever() -> None:
    await asyncio.Event().wait()


def test_a_day_passes_at_once_and_to_the_second() -> None:
    async def wait() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(86_400)
        return loop.time() - began

    began = time.monotonic()
    assert simulate(wait()) == 86_400
    assert time.monotonic() - began < 5


def test_timers_ring_in_their_order() -> None:
    async def ring() -> list[float]:
        rung: list[float] = []
        naps = [3.0, 0.5, 2.0, 0.5, 9.0, 0.0]

        async def one(nap_s: float) -> None:
            await asyncio.sleep(nap_s)
            rung.append(nap_s)

        await asyncio.gather(*map(one, naps))
        return rung

    assert simulate(ring(), seed=4) == sorted([3.0, 0.5, 2.0, 0.5, 9.0, 0.0])


def test_without_a_seed_tasks_go_as_they_came() -> None:
    assert simulate(order_of(10)) == list(range(10))


def test_a_seed_decides_who_goes_first() -> None:
    orders = [simulate(order_of(10), seed=seed) for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(10)) for order in orders)


def test_plain_callbacks_keep_their_order_whatever_the_seed() -> None:
    async def call() -> list[int]:
        heard: list[int] = []
        for number in range(10):
            asyncio.get_running_loop().call_soon(heard.append, number)
        await asyncio.sleep(1)
        return heard

    assert all(simulate(call(), seed=seed) == list(range(10)) for seed in range(20))


def test_timers_may_ring_a_little_late_and_never_early() -> None:
    async def wait() -> list[float]:
        loop = asyncio.get_running_loop()
        late = []
        for _ in range(50):
            began = loop.time()
            await asyncio.sleep(1.0)
            late.append(loop.time() - began - 1.0)
        return late

    late = simulate(wait(), seed=1, jitter_s=0.01)
    assert all(-1e-9 <= s <= 0.01 + 1e-9 for s in late)
    assert len(set(late)) > 40
    assert simulate(wait(), seed=1, jitter_s=0.01) == late


def test_whoever_blocks_the_loop_makes_the_others_late() -> None:
    async def block() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        sleeping = asyncio.create_task(asyncio.sleep(1.0))
        await asyncio.sleep(0)
        loop.stall(5.0)
        await sleeping
        assert loop.stalled_s == 5.0
        return loop.time()

    assert simulate(block()) == 5.0


def test_a_timer_that_was_cancelled_costs_no_time() -> None:
    async def cancel() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(100, lambda: None).cancel()
        await asyncio.wait_for(asyncio.sleep(1), 50)
        return loop.time()

    assert simulate(cancel()) == 1.0


def test_a_wait_without_end_is_told_with_whoever_waits() -> None:
    async def lost() -> None:
        await asyncio.gather(for_ever(), asyncio.sleep(2))

    with pytest.raises(Deadlock, match=r"at 2 s no timer is left.*for_ever, line \d+.*lost, line \d+"):
        simulate(lost())


def test_a_deadlock_is_told_though_somebody_does_not_heed_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def deaf() -> None:
        try:
            await for_ever()
        except asyncio.CancelledError:
            await for_ever()

    with pytest.raises(Deadlock, match="deaf"):
        simulate(deaf())
    gc.collect()
    assert "deaf" not in caplog.text, "asyncio has nothing to add when the task is destroyed, in whoever's time that is"


def test_time_that_stands_still_is_told() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match=r"time does not advance at 0 s.*spin"):
        simulate(spin())


def test_a_fault_is_the_callers() -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        simulate(fail())


def test_what_is_left_at_the_end_is_ended() -> None:
    ended = []

    async def long() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(True)

    async def leave() -> None:
        asyncio.get_running_loop().create_task(long())
        await asyncio.sleep(1)

    simulate(leave())
    assert ended == [True]


def test_threads_are_refused_in_words() -> None:
    async def think() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="threads cannot run in virtual time"):
        simulate(think())


def test_work_knows_that_time_is_virtual() -> None:
    async def ask() -> bool:
        return in_virtual_time()

    assert simulate(ask())
    assert not asyncio.run(ask())
