"""`waiting.run_with_deadline` in virtual time: to the second, with nothing left at work that is not counted."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Coroutine
from typing import Any

import pytest

from toolwise.concurrency.deadlines import GRACE_S, abandoned_counts, run_with_deadline
from toolwise.testing.virtual_time import VirtualLoop, simulate

LATE = TimeoutError("late")


async def deaf(for_s: float) -> str:
    """Swallows cancellations until so much time has passed."""
    loop = asyncio.get_running_loop()
    until = loop.time() + for_s
    while (left_s := until - loop.time()) > 0:
        try:
            await asyncio.sleep(left_s)
        except asyncio.CancelledError:
            continue
    return "at last"


async def seconds(work: Coroutine[Any, Any, Any]) -> float:
    """How long until it raises that it is late, or is cancelled."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises((TimeoutError, asyncio.CancelledError)):
        await work
    return loop.time() - began


@pytest.mark.parametrize(("deaf_s", "expected"), [(3.5, 3.5), (3.0 + GRACE_S, 3.0 + GRACE_S), (100.0, 3.0 + GRACE_S)])
def test_the_deadline_and_the_grace_are_kept_to_the_second(deaf_s: float, expected: float) -> None:
    assert simulate(seconds(run_with_deadline(3.0, deaf(deaf_s), LATE))) == expected


def test_nested_deadlines_do_not_add_up() -> None:
    inner = run_with_deadline(2.0, deaf(100.0), LATE)
    assert simulate(seconds(run_with_deadline(2.5, inner, LATE))) <= 2.5 + GRACE_S


def test_work_that_is_left_behind_is_counted_though_the_wait_is_cancelled_in_its_grace() -> None:
    async def cancel() -> int:
        before = abandoned_counts().get("deaf", 0)
        waiting = asyncio.create_task(run_with_deadline(1.0, deaf(100.0), LATE))
        await asyncio.sleep(1.0 + GRACE_S / 2)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert asyncio.get_running_loop().time() == 1.0 + GRACE_S
        return abandoned_counts()["deaf"] - before

    assert simulate(cancel()) == 1


@pytest.mark.parametrize("times", [1, 2, 20])
def test_however_often_it_is_cancelled_the_work_ends_first(times: int) -> None:
    async def cancel() -> None:
        waiting = asyncio.create_task(run_with_deadline(50.0, deaf(1.5), LATE))
        await asyncio.sleep(1.0)
        for _ in range(times):
            waiting.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert asyncio.get_running_loop().time() == 1.5
        assert asyncio.all_tasks() == {asyncio.current_task()}

    simulate(cancel())


def test_work_that_was_never_begun_does_not_complain() -> None:
    begun = []

    async def work() -> None:
        begun.append(True)

    async def wait() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # heard in the round in which the work is to begin: the seed decides which of the two comes first
        await run_with_deadline(50.0, work(), LATE)

    async def cancel() -> None:
        await asyncio.wait({asyncio.create_task(wait())})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(20):
            simulate(cancel(), seed=seed)
        gc.collect()
    assert 0 < len(begun) < 20
    assert [str(w.message) for w in caught if w.category is RuntimeWarning] == []  # not sockets of other tests


@pytest.mark.long
def test_a_fault_in_the_very_instant_of_a_cancellation_is_heard() -> None:
    async def fail() -> None:
        await asyncio.sleep(1.0)
        raise OSError("broken")

    async def cancel() -> list[Any]:
        unheard: list[Any] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.set_exception_handler(lambda loop, context: unheard.append(context))
        waiting = asyncio.create_task(run_with_deadline(50.0, fail(), LATE))
        await asyncio.sleep(1.0)
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({waiting})
        del waiting
        gc.collect()
        return unheard

    for seed in range(20):
        assert simulate(cancel(), seed=seed) == []
