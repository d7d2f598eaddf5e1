"""Work on long texts leaves the event loop free; work on short ones is done at once."""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import ContextVar

import pytest

from toolwise.concurrency.text_threads import LONG_CHARS, run_if_long, run_in_thread

name: ContextVar[str] = ContextVar("name", default="")


def test_only_long_texts_go_to_a_thread() -> None:
    async def threads() -> list[threading.Thread]:
        return [await run_if_long(chars, threading.current_thread) for chars in (LONG_CHARS, LONG_CHARS + 1)]

    short, long = asyncio.run(threads())
    assert short is threading.current_thread()
    assert long is not threading.current_thread()


def test_the_loop_goes_on_meanwhile() -> None:
    async def work() -> str:
        released = threading.Event()
        asyncio.get_running_loop().call_soon(released.set)
        return "done" if await run_if_long(LONG_CHARS + 1, released.wait, 10) else "blocked"

    assert asyncio.run(work()) == "done"


def test_the_thread_sees_the_callers_context() -> None:
    async def work() -> str:
        name.set("mine")
        return await run_if_long(LONG_CHARS + 1, name.get)

    assert asyncio.run(work()) == "mine"


def test_many_calls_at_once_each_get_their_own_result() -> None:
    async def work() -> list[object]:
        calls = [run_in_thread(divmod, 100, number) for number in range(50)]
        return await asyncio.gather(*calls, return_exceptions=True)

    fault, *results = asyncio.run(work())
    assert isinstance(fault, ZeroDivisionError)
    assert results == [divmod(100, number) for number in range(1, 50)]


def test_a_call_that_is_cancelled_before_its_turn_is_not_made() -> None:
    made: list[str] = []

    async def work() -> None:
        may = threading.Event()
        busy = [asyncio.create_task(run_in_thread(may.wait, 10)) for _ in range(2)]
        await asyncio.sleep(0)
        late = asyncio.create_task(run_in_thread(made.append, "late"))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        may.set()
        await asyncio.gather(*busy, run_in_thread(made.append, "next"))

    asyncio.run(work())
    assert made == ["next"]


def test_one_long_call_does_not_hold_up_short_ones() -> None:
    async def work() -> float:
        may, start = threading.Event(), time.monotonic()
        long = asyncio.create_task(run_in_thread(may.wait, 10))
        await asyncio.gather(*(run_in_thread(int) for _ in range(20)))
        may.set()
        await long
        return time.monotonic() - start

    assert asyncio.run(work()) < 10


def test_a_stop_iteration_is_a_fault_like_any_other() -> None:
    async def work() -> None:
        await run_in_thread(next, iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(work())
