"""The pool of tool workers: limits, fairness between modules, slow calls, failed starts, and closing."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from toolwise.tools.isolation import tool_pool as pools
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.tool_pool import ToolPool, default_limit, read_result
from toolwise.tools.isolation.tool_worker import LOAD_TIMEOUT_S, LoadFault, ToolDied

T = TypeVar("T")
linux = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="workers are forked on Linux")
SOURCE = """
import os, time
def where(seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return os.getpid()
"""


@pytest.fixture
def pool() -> Iterator[ToolPool]:
    made = ToolPool(limit=2)
    yield made
    made.close()
    assert made.pids() == []


@pytest.fixture
def files(tmp_path: Path) -> list[ObjectRef]:
    """The same function in three files."""
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(SOURCE)
    return [ObjectRef(ModuleRef(None, str(tmp_path / f"{name}.py")), "where") for name in "abc"]


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


async def where(pool: ToolPool, target: ObjectRef, seconds: float = 0.0) -> int:
    return int((await pool.run(target, {"seconds": seconds}))[0])


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_no_more_workers_than_the_limit(pool: ToolPool, files: list[ObjectRef]) -> None:
    async def many() -> list[int]:
        return await asyncio.gather(*(where(pool, files[0], 0.01) for _ in range(20)))

    assert len(set(run(many()))) <= 2
    assert len(pool.pids()) <= 2


def test_calls_that_hang_keep_no_one_else_out(pool: ToolPool, files: list[ObjectRef]) -> None:

    async def beside_those_that_hang() -> int:
        hanging = [asyncio.create_task(where(pool, files[0], 1000)) for _ in range(4)]
        await asyncio.sleep(0)
        found = await where(pool, files[0])
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        return found

    assert run(beside_those_that_hang()) > 0
    assert pool.killed <= 4


def test_even_slow_calls_are_no_more_than_the_most(files: list[ObjectRef]) -> None:
    pool = ToolPool(limit=1, max_processes=2)

    async def three() -> int:
        hanging = [asyncio.create_task(where(pool, files[0], 1000)) for _ in range(3)]
        await until(lambda: len(pool._roster.workers("slow")) == 2)
        await asyncio.sleep(0.3)
        found = len(pool.pids())
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        return found

    assert run(three()) == 2
    pool.close()


@pytest.mark.long
def test_another_module_gets_a_worker_though_this_one_is_always_wanted(pool: ToolPool, files: list[ObjectRef]) -> None:
    async def crowd() -> None:
        wanted = [asyncio.create_task(where(pool, files[0], 0.02)) for _ in range(10_000)]
        await until(lambda: wanted[5].done())
        await where(pool, files[1])
        await where(pool, files[2])
        assert not wanted[-1].done()
        for task in wanted:
            task.cancel()
        await asyncio.wait(wanted)

    run(crowd())


def test_an_idle_module_makes_room_for_another(files: list[ObjectRef]) -> None:
    pool = ToolPool(limit=2, max_processes=2)

    async def each() -> list[int]:
        return [await where(pool, target) for target in files]

    assert len(set(run(each()))) == 3
    idle = [worker.module_ref for worker in pool._roster.workers("idle")]
    assert idle == [target.module_ref for target in files[1:]]
    pool.close()


def test_who_stops_waiting_leaves_the_worker_to_others(pool: ToolPool, files: list[ObjectRef]) -> None:
    async def cancelled_while_it_comes_up() -> int:
        task = asyncio.create_task(where(pool, files[0]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        [coming] = pool.pids() or [0]
        found = await where(pool, files[0])
        above = [found]  # its supervisor, its zygote, and the zygote's supervisor
        while above[-1] not in (os.getpid(), 1):
            above.append(int(Path(f"/proc/{above[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
        assert coming in (0, *above)
        return found

    assert run(cancelled_while_it_comes_up()) > 0
    assert pool.killed == 0


def test_a_killed_worker_is_replaced_before_anybody_asks(pool: ToolPool, files: list[ObjectRef]) -> None:
    async def kill_at_work() -> tuple[int, int]:
        first = await where(pool, files[0])
        task = asyncio.create_task(where(pool, files[0], 1000))
        await until(lambda: pool._roster.workers("busy"))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ToolDied, match="killed by SIGKILL"):
            await task
        await until(lambda: pool._roster.workers("idle", of=files[0].module_ref))
        return first, await where(pool, files[0])

    first, second = run(kill_at_work())
    assert first != second
    assert pool.killed == 1


def test_a_worker_that_dies_at_rest_is_not_handed_out(pool: ToolPool, files: list[ObjectRef]) -> None:
    first = run(where(pool, files[0]))
    os.kill(first, signal.SIGKILL)
    run(until(lambda: first not in pool.pids()))
    assert run(where(pool, files[0])) != first


def test_a_module_that_does_not_load_says_why_to_all_who_wait(pool: ToolPool, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    target = ObjectRef(ModuleRef(None, str(tmp_path / "broken.py")), "where")

    async def several() -> list[Any]:
        return await asyncio.gather(*(where(pool, target) for _ in range(5)), return_exceptions=True)

    faults = run(several())
    assert all(isinstance(fault, LoadFault) and "no_such_module_at_all" in str(fault) for fault in faults)


def test_a_process_that_ends_while_it_loads_is_a_death(pool: ToolPool, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os; os._exit(9)")
    with pytest.raises(ToolDied, match="ended while it loaded"):
        run(where(pool, ObjectRef(ModuleRef(None, str(tmp_path / "ends.py")), "where")))


def test_a_module_that_takes_for_ever_to_load_is_given_up(
    pool: ToolPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported to all waiting callers at once: each of them would wait as long again."""
    monkeypatch.setattr("toolwise.tools.isolation.tool_worker.LOAD_TIMEOUT_S", 1.0)
    (tmp_path / "slow.py").write_text("import time; time.sleep(1000)")
    target = ObjectRef(ModuleRef(None, str(tmp_path / "slow.py")), "where")

    async def several() -> list[Any]:
        return await asyncio.gather(*(where(pool, target) for _ in range(5)), return_exceptions=True)

    faults = run(several())
    assert all(isinstance(fault, LoadFault) for fault in faults)
    assert {str(fault) for fault in faults} == {f"{target.module_ref} took longer than 1 s to load in a worker process"}


def test_a_rollouts_own_tool_is_told_that_its_module_does_not_load_rather_than_that_no_worker_is_free() -> None:
    assert pools.RESERVE_TIMEOUT_S > LOAD_TIMEOUT_S


@pytest.fixture
def open_files() -> Iterator[Callable[[int], None]]:
    """`open_files(n)` limits the open files to n more than are open now."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(more: int) -> None:
        names = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
        free = itertools.filterfalse({int(name) for name in names}.__contains__, itertools.count())
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, more, None)), limits[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@linux
def test_without_descriptors_for_another_worker_calls_wait_for_those_that_are_up(
    files: list[ObjectRef], open_files: Callable[[int], None]
) -> None:
    pool = ToolPool(limit=2, max_processes=64)

    async def many() -> list[int]:
        await where(pool, files[0])
        open_files(16)
        return await asyncio.gather(*(where(pool, files[0], 0.3) for _ in range(12)))

    found = run(many())
    pool.close()
    assert len(found) == 12
    assert len(set(found)) < 12


@linux
def test_a_worker_that_is_up_needs_no_more_descriptors(files: list[ObjectRef], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it did, it would be killed during its call as soon as others had used them up."""
    pool, opened = ToolPool(limit=2), os.pidfd_open
    calls: list[int] = []

    def open_once(pid: int, flags: int = 0) -> int:
        if pid in calls:
            raise OSError(errno.EMFILE, "Too many open files")
        calls.append(pid)
        return opened(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", open_once)

    async def many() -> list[int]:
        return await asyncio.gather(*(where(pool, files[0], 0.1) for _ in range(4)))

    try:
        assert len(run(many())) == 4
        assert pool.killed == 0
    finally:
        monkeypatch.undo()
        pool.close()


@linux
def test_without_descriptors_for_a_single_worker_a_call_says_so(
    files: list[ObjectRef], open_files: Callable[[int], None]
) -> None:
    pool = ToolPool(limit=2)

    async def two() -> list[Any]:
        open_files(5)  # a channel, a pipe, and not a second one
        return await asyncio.gather(*(where(pool, files[0]) for _ in range(2)), return_exceptions=True)

    faults = run(two())
    assert all("Too many open files" in str(fault) for fault in faults)
    before = len(os.listdir("/proc/self/fd"))
    run(two())
    assert len(os.listdir("/proc/self/fd")) == before
    pool.close()


@linux
def test_workers_are_buried_where_the_trainer_has_more_than_1024_files_open(files: list[ObjectRef]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 2048:
        pytest.skip("no more files may be open here")
    pool = ToolPool(limit=2)

    async def killed() -> None:
        for _ in range(2):
            await where(pool, files[0])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(where(pool, files[0], 1000), 0.05)
        await until(lambda: len(pool._live_workers) <= 2)  # the zygote, and an idle worker

    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        run(killed())
        pool.close()
        assert not pool._live_workers
    finally:
        pool.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("soft", "max_processes"), [(1024, 153), (300, 8), (64, 8), (65536, 256), (resource.RLIM_INFINITY, 256)]
)
def test_the_most_processes_fit_the_limit_of_open_files(
    soft: int, max_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    assert ToolPool(limit=8).max_processes == max_processes


def test_no_interpreter_to_start_is_a_death(
    pool: ToolPool, files: list[ObjectRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(ToolDied, match="no worker process can be started"):
        run(where(pool, files[0]))


def test_closing_ends_calls_that_run_and_those_that_wait(files: list[ObjectRef]) -> None:
    pool = ToolPool(limit=1)

    async def close_in_the_middle() -> list[Any]:
        tasks = [asyncio.create_task(where(pool, files[0], 1000)) for _ in range(2)]
        await until(lambda: pool._roster.workers("busy"))
        pool.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(fault, ToolDied) for fault in run(close_in_the_middle()))
    assert pool.pids() == []
    with pytest.raises(ToolDied, match="closed"):
        run(where(pool, files[0]))


def test_two_loops_at_once_share_a_pool(files: list[ObjectRef]) -> None:
    pool = ToolPool(limit=2, max_processes=2)

    async def beside() -> list[list[int]]:
        async def many() -> list[int]:
            return await asyncio.gather(*(where(pool, files[0], 0.005) for _ in range(20)))

        return list(await asyncio.gather(asyncio.to_thread(run, many()), asyncio.to_thread(run, many())))

    found = run(beside())
    pool.close()
    assert len({pid for pids in found for pid in pids}) <= 2


def test_the_default_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLWISE_TOOL_WORKERS", raising=False)
    assert default_limit() == min(32, 4 * (os.cpu_count() or 1))
    monkeypatch.setenv("TOOLWISE_TOOL_WORKERS", "3")
    assert ToolPool().limit == 3
    monkeypatch.setenv("TOOLWISE_TOOL_WORKERS", "many")
    assert default_limit() == min(32, 4 * (os.cpu_count() or 1))


@pytest.mark.parametrize(
    "value", [None, [], ["a", 1.0], ["a", True, {}], ["a", "1", {}], [1, None, {}], ["a", None, []]]
)
def test_an_answer_of_another_shape_is_refused(value: Any) -> None:
    with pytest.raises(ToolDied, match="unexpected reply"):
        read_result(value)


def test_no_time_passes_in_a_killed_call(pool: ToolPool, files: list[ObjectRef]) -> None:
    async def kill() -> float:
        await where(pool, files[0])
        task = asyncio.create_task(where(pool, files[0], 1000))
        await until(lambda: pool._roster.workers("busy"))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        task.cancel()
        await asyncio.wait({task})
        return time.monotonic() - began

    assert run(kill()) < 1
