"""Tool workers that are killed or stopped while idle: no call fails because of it, and none waits for long."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.tool_pool import ToolPool
from toolwise.tools.isolation.tool_worker import CallNotDelivered, ToolDied, ToolWorker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
T = TypeVar("T")
SOURCE = """
import os, time
{top}
def where(seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return os.getpid()
"""


@pytest.fixture(params=["", "FILE = open(__file__)"], ids=["forked", "loaded by each"])
def target(tmp_path: Path, request: pytest.FixtureRequest) -> ObjectRef:
    (tmp_path / "t.py").write_text(SOURCE.format(top=request.param))
    return ObjectRef(ModuleRef(None, str(tmp_path / "t.py")), "where")


@pytest.fixture
def pool() -> Iterator[ToolPool]:
    made = ToolPool(limit=2)
    yield made
    made.close()
    assert made.pids() == []


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


async def where(pool: ToolPool, target: ObjectRef, count: int = 4, seconds: float = 0.02) -> list[int]:
    found = await asyncio.gather(*(pool.run(target, {"seconds": seconds}) for _ in range(count)))
    return [int(text) for text, _, _ in found]


def signal_all(pool: ToolPool, number: int, *, zygotes: bool = False) -> int:
    """Signal the idle workers, and none that is running a call."""
    with pool._lock:
        resting = pool._roster.workers("idle")
        resting += [worker for worker, _ in pool._roster.zygotes.values()] if zygotes else []
        for worker in resting:
            if worker.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, number)
    return len(resting)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_was_killed_or_stopped_while_it_waited_costs_a_moment(
    pool: ToolPool, target: ObjectRef, number: int
) -> None:
    before = run(where(pool, target))
    assert signal_all(pool, number)
    began = time.monotonic()
    after = run(where(pool, target))
    assert time.monotonic() - began < 10
    assert not set(after) & set(before)
    assert pool.killed == 0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_so_does_a_zygote(pool: ToolPool, tmp_path: Path, number: int) -> None:
    (tmp_path / "t.py").write_text(SOURCE.format(top=""))
    target = ObjectRef(ModuleRef(None, str(tmp_path / "t.py")), "where")
    run(where(pool, target, 1))
    for _ in range(2):
        assert signal_all(pool, number, zygotes=True) >= 2
        began = time.monotonic()
        assert len(run(where(pool, target))) == 4
        assert time.monotonic() - began < 15
    assert pool.killed == 0
    assert pool._roster.zygotes, "another took its place"


def test_a_zygotes_death_harms_no_call_that_runs(pool: ToolPool, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SOURCE.format(top=""))
    target = ObjectRef(ModuleRef(None, str(tmp_path / "t.py")), "where")

    async def beside() -> list[int]:
        await where(pool, target)
        calls = asyncio.create_task(where(pool, target, 2, 1.0))
        while len(pool._roster.workers("busy", "slow")) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        signal_all(pool, signal.SIGKILL, zygotes=True)
        return await calls

    assert len(run(beside())) == 2
    assert pool.killed == 0


def test_a_call_that_never_reached_its_worker_is_made_again(
    pool: ToolPool, target: ObjectRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(where(pool, target))
    lost: list[int] = []

    def kill_and_pass(worker: ToolWorker) -> bool:
        """As if it were killed right after the check."""
        if not lost and worker.pid is not None:
            lost.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
        return True

    monkeypatch.setattr(ToolWorker, "is_ready", kill_and_pass)
    found = run(where(pool, target, 1))
    assert lost
    assert lost[0] not in found
    assert pool.killed == 0


def test_a_death_in_the_call_is_the_calls(pool: ToolPool, target: ObjectRef) -> None:
    async def kill_at_work() -> None:
        [pid] = await where(pool, target, 1)
        call = asyncio.create_task(where(pool, target, 1, 30.0))
        while not any(worker.call_started_at for worker in pool._roster.workers("busy", "slow")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ToolDied, match="killed by SIGKILL") as caught:
            await call
        assert not isinstance(caught.value, CallNotDelivered)

    run(kill_at_work())
    assert pool.killed == 1


@pytest.mark.parametrize("seconds", [1.5, pytest.param(20.0, marks=pytest.mark.long)])
def test_whoever_kills_all_that_wait_blames_nobody(pool: ToolPool, target: ObjectRef, seconds: float) -> None:
    killed, over = [0], threading.Event()

    def kill() -> None:
        while not over.wait(0.02):
            killed[0] += signal_all(pool, signal.SIGKILL)

    async def calls() -> int:
        count, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            count += len(await where(pool, target, 6, 0.01))
            await asyncio.sleep(0.03)  # some of them are idle during this time
        return count

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert run(calls()) > 5
    finally:
        over.set()
        killer.join()
    assert killed[0] > 0
    assert pool.killed == 0
