"""Deadlines stop the work, errors wait for sibling tasks, and blocking work gets its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest

from toolwise.concurrency import deadlines
from toolwise.concurrency.deadlines import (
    WorkClock,
    abandoned_counts,
    call_in_thread,
    exclude_pool_queue_time,
    exclude_queue_time,
    gather_all,
    in_virtual_time,
    run_with_deadline,
)
from toolwise.testing.virtual_time import simulate

T = TypeVar("T")
LATE = TimeoutError("late")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 20)

    return asyncio.run(limited())


async def give(value: T, after_s: float = 0.0) -> T:
    await asyncio.sleep(after_s)
    return value


async def fail(fault: BaseException, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise fault


def test_work_in_time_gives_its_result() -> None:
    assert run(run_with_deadline(5, give(3), LATE)) == 3


def test_work_out_of_time_is_ended_and_raises_what_the_caller_chose() -> None:
    ended = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError) as caught:
        simulate(run_with_deadline(0.02, long(), LATE))
    assert caught.value is LATE
    assert ended == [True]


@pytest.mark.parametrize("limit_s", [0, -1])
def test_no_time_at_all_does_not_even_begin(limit_s: float) -> None:
    begun = []

    async def work() -> None:
        begun.append(True)

    with pytest.raises(TimeoutError, match="late"):
        run(run_with_deadline(limit_s, work(), LATE))
    assert begun == []


def test_the_works_own_timeout_is_told_apart() -> None:
    own = TimeoutError("mine")
    with pytest.raises(TimeoutError) as caught:
        run(run_with_deadline(5, fail(own), LATE))
    assert caught.value is own


def test_work_that_cancels_itself_does_not_cancel_whoever_waits() -> None:
    with pytest.raises(RuntimeError, match="cancelled itself"):
        run(run_with_deadline(5, fail(asyncio.CancelledError()), LATE))


def test_cancelling_the_wait_ends_the_work_first() -> None:
    ended = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            ended.append(True)

    async def cancel() -> None:
        wait = asyncio.create_task(run_with_deadline(60, long(), LATE))
        await asyncio.sleep(0.02)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert ended == [True]

    simulate(cancel())


def test_all_results_come_in_order() -> None:
    assert simulate(gather_all(give(i, 0.02 - i / 100) for i in range(3))) == [0, 1, 2]


def test_a_fault_waits_until_the_others_have_ended() -> None:
    ended = []

    async def long() -> None:
        await asyncio.sleep(0.05)
        ended.append(True)

    with pytest.raises(ValueError, match="first"):
        simulate(gather_all([fail(ValueError("first")), long(), fail(ValueError("second"))]))
    assert ended == [True]


def test_cancelling_all_waits_until_all_have_ended() -> None:
    ended = []

    async def long(after_s: float) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(after_s)
            ended.append(after_s)

    async def cancel() -> None:
        wait = asyncio.create_task(gather_all(long(s) for s in (0.0, 0.02, 0.05)))
        await asyncio.sleep(0.02)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert ended == [0.0, 0.02, 0.05]

    simulate(cancel())


def test_blocking_work_gives_its_result_or_its_fault() -> None:
    assert run(call_in_thread(lambda: threading.current_thread().daemon)) is True
    with pytest.raises(ZeroDivisionError):
        run(call_in_thread(lambda: 1 // 0))
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(call_in_thread(lambda: next(iter(()))))


def test_blocking_work_sees_the_callers_context() -> None:
    who: ContextVar[str] = ContextVar("who")

    async def ask() -> str:
        who.set("me")
        return await call_in_thread(who.get)

    assert run(ask()) == "me"


def test_blocking_work_that_ends_after_its_loop_troubles_no_one() -> None:
    free, ended = threading.Event(), threading.Event()

    def hang() -> None:
        free.wait(20)
        ended.set()

    with pytest.raises(TimeoutError, match="late"):
        run(run_with_deadline(0.02, call_in_thread(hang), LATE))
    free.set()
    assert ended.wait(5)


def test_a_thread_that_nobody_waits_for_is_counted_by_name(caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()
    with pytest.raises(TimeoutError, match="late"):
        run(run_with_deadline(0.02, call_in_thread(lambda: free.wait(20), name="tool of this test"), LATE))
    free.set()
    assert abandoned_counts()["tool of this test"] == 1
    assert "tool of this test cannot be stopped in its thread and is abandoned" in caplog.text
    assert run(call_in_thread(lambda: 3, name="tool in time")) == 3
    assert "tool in time" not in abandoned_counts()


async def stubborn() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


def test_a_task_that_does_not_heed_its_cancellation_is_counted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GRACE_S", 0.02)
    before = abandoned_counts().get("stubborn", 0)

    async def late() -> None:
        with pytest.raises(TimeoutError, match="late"):
            await run_with_deadline(0.02, stubborn(), LATE)

    deadlines.run(late())
    assert abandoned_counts()["stubborn"] == before + 2  # at its deadline, and at the end of the loop


def test_a_loop_ends_though_a_task_does_not(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(deadlines, "GRACE_S", 0.05)

    async def begin() -> str:
        begun.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)
        return "done"

    begun: list[asyncio.Task[None]] = []
    began = time.monotonic()
    assert deadlines.run(begin()) == "done"
    assert time.monotonic() - began < 10
    assert "stubborn ignores its cancellation and is abandoned" in caplog.text
    gc.collect()
    assert "destroyed but it is pending" not in caplog.text


def test_at_the_end_of_a_loop_tasks_put_themselves_away() -> None:
    ended = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            ended.append(True)

    async def begin() -> None:
        begun.append(asyncio.create_task(long()))
        await asyncio.sleep(0)

    begun: list[asyncio.Task[None]] = []
    deadlines.run(begin())
    assert ended == [True]


def test_a_fault_comes_out_of_the_loop_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        deadlines.run(fail(ZeroDivisionError()))
    with pytest.raises(asyncio.CancelledError):
        deadlines.run(fail(asyncio.CancelledError()))


def test_a_program_ends_though_a_thread_and_a_task_hang() -> None:
    program = """
        import asyncio, contextlib, time
        from toolwise.concurrency import deadlines
        deadlines.GRACE_S = 0.1
        async def stubborn():
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        async def main():
            tasks = [asyncio.create_task(stubborn()), asyncio.create_task(asyncio.to_thread(time.sleep, 1000))]
            await asyncio.wait(tasks, timeout=0.05)
            print(await asyncio.to_thread(sum, [1, 2]))
        deadlines.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "3\n"
    assert done.stderr == "stubborn ignores its cancellation and is abandoned (1 so far)\n"


def test_an_interrupt_ends_the_loop() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored

    async def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            deadlines.run(interrupted())
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_loop_with_a_clock_of_its_own_says_so() -> None:
    async def ask() -> bool:
        return in_virtual_time()

    class Virtual(asyncio.SelectorEventLoop):
        virtual_time = True

    assert asyncio.run(ask()) is False
    with asyncio.Runner(loop_factory=Virtual) as runner:
        assert runner.run(ask()) is True


def test_time_in_a_queue_does_not_count() -> None:
    clock = WorkClock()

    async def work() -> str:
        await asyncio.sleep(0.02)
        with exclude_queue_time():
            await asyncio.sleep(0.5)
            with exclude_queue_time():
                await asyncio.sleep(0.01)
        return "done"

    assert simulate(run_with_deadline(0.3, work(), LATE, clock)) == "done"
    assert clock.queue_s == pytest.approx(0.51)


def test_the_deadline_goes_on_after_the_queue() -> None:
    clock = WorkClock()

    async def work() -> None:
        with exclude_queue_time():
            await asyncio.sleep(0.05)
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError) as caught:
        simulate(run_with_deadline(0.1, work(), LATE, clock))
    assert caught.value is LATE


def test_the_deadline_covers_the_work_before_the_queue_too() -> None:
    async def work() -> None:
        await asyncio.sleep(6)
        with exclude_queue_time():
            await asyncio.sleep(100)
        await asyncio.sleep(60)

    async def measure() -> float:
        with pytest.raises(TimeoutError):
            await run_with_deadline(10, work(), LATE, WorkClock())
        return asyncio.get_running_loop().time()

    assert simulate(measure()) == pytest.approx(110)


def test_what_is_ended_in_the_queue_has_waited() -> None:
    clock = WorkClock()

    async def work() -> None:
        with exclude_queue_time():
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        simulate(run_with_deadline(0.2, run_with_deadline(0.1, work(), TimeoutError("never"), clock), LATE))
    assert clock.queue_s == pytest.approx(0.2)


def test_a_pool_of_threads_is_a_queue() -> None:
    clock = WorkClock()

    async def work() -> list[Any]:
        with ThreadPoolExecutor(1) as pool:
            works = [
                asyncio.wrap_future(pool.submit(exclude_pool_queue_time(lambda: time.sleep(0.2)))) for _ in range(3)
            ]
            return await asyncio.gather(*works)

    run(run_with_deadline(0.9, work(), LATE, clock))
    assert clock.queue_s > 0.3


def test_without_a_clock_a_queue_is_only_a_wait() -> None:
    async def work() -> int:
        with exclude_queue_time():
            return exclude_pool_queue_time(lambda: 3)()

    assert run(work()) == 3
