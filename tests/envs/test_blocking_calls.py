"""Blocking environments: run off the event loop, closed once, and abandoned if a call never returns."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from toolwise.envs.blocking_calls import BlockingCalls


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def test_calls_run_in_another_thread_and_give_what_they_give() -> None:
    async def live() -> Any:
        return await BlockingCalls("it").call(threading.get_ident)

    assert run(live()) != threading.get_ident()


@pytest.mark.parametrize("ending", [lambda: sys.exit(3), lambda: (_ for _ in ()).throw(KeyboardInterrupt())])
def test_what_would_end_the_program_ends_only_the_call(ending: Any) -> None:
    async def live() -> str:
        calls = BlockingCalls("it")
        with pytest.raises(RuntimeError, match=r"it (raised|called)"):
            await calls.call(ending)
        return await calls.call(lambda: "still here")

    assert run(live()) == "still here"


def test_an_exception_passes_and_the_next_call_goes_on() -> None:
    async def live() -> int:
        calls = BlockingCalls("it")
        with pytest.raises(ZeroDivisionError):
            await calls.call(lambda: 1 // 0)
        return await calls.call(lambda: 2)

    assert run(live()) == 2


def test_after_a_call_that_did_not_come_back_further_ones_are_refused_and_its_thread_closes() -> None:
    free, closed, log = threading.Event(), threading.Event(), []

    def hang() -> None:
        free.wait(10)
        log.append("back")

    def close() -> None:
        log.append("closed")
        closed.set()

    async def live() -> None:
        calls = BlockingCalls("the world")
        late = asyncio.create_task(calls.call(hang))
        await asyncio.sleep(0.05)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert calls.has_hung_call
        with pytest.raises(RuntimeError, match="the world cannot go on"):
            await calls.call(lambda: log.append("never"))
        await calls.end(close)
        assert log == []
        free.set()
        await asyncio.to_thread(closed.wait, 10)

    run(live())
    assert log == ["back", "closed"]


def test_it_is_closed_once() -> None:
    log: list[str] = []

    async def live() -> None:
        calls = BlockingCalls("it")
        await calls.call(lambda: None)
        await calls.end(lambda: log.append("closed"))
        await calls.end(lambda: log.append("closed"))
        with pytest.raises(RuntimeError, match="cannot go on"):
            await calls.call(lambda: None)

    run(live())
    assert log == ["closed"]


def test_virtual_time_uses_no_threads() -> None:
    async def live() -> int:
        asyncio.get_running_loop().virtual_time = True  # type: ignore[attr-defined]
        return await BlockingCalls("it").call(threading.get_ident)

    assert run(live()) == threading.get_ident()
