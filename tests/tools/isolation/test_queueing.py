"""Waiting for a worker does not count towards a tool's deadline: 64 calls of a blocking tool."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.imports import load_reference
from toolwise.config.schema import RunConfig
from toolwise.envs.tool_env import ToolEnv
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.tools import isolation
from toolwise.tools.catalog import build_tools
from toolwise.tools.isolation import roster
from toolwise.tools.isolation import tool_pool as pools
from toolwise.tools.isolation.code_location import ObjectRef
from toolwise.tools.isolation.tool_pool import ToolPool
from toolwise.training.rollout_setup import build_scheduler
from toolwise.types import RouteDecision, Task

linux = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="workers are forked on Linux")
TOOLS = '''
import os, threading, time
{top}
def nap(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return f"rested {{os.getpid()}} {{above_supervisor()}}"

def above_supervisor() -> str:
    return open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[1]

def spin(seconds: float) -> str:
    """Computes."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return str(os.getpid())

def environ() -> str:
    """Its own environment as the kernel has it."""
    return open("/proc/self/environ").read()
'''


def write(tmp_path: Path, top: str = "") -> Path:
    path = tmp_path / "blocking.py"
    path.write_text(TOOLS.format(top=top))
    return path


def target(path: Path, name: str = "nap") -> ObjectRef:
    return ObjectRef.of(load_reference(f"{path}:{name}", what="tool"))


@pytest.fixture
def pool() -> Iterator[ToolPool]:
    made = ToolPool(limit=2)
    yield made
    made.close()


@pytest.mark.long
def test_sixty_four_calls_of_a_tool_that_blocks_for_a_second(tmp_path: Path) -> None:
    """On two cores, in less than 3 s: with 8 workers at a time they would take 8, and 54 would be late at 5."""
    tools = build_tools([f"{write(tmp_path)}:nap"])
    line = '<tool_call>{"name": "nap", "arguments": {"seconds": %s}}</tool_call>'

    def decisions(n: int) -> list[RouteDecision]:
        task = Task(task_id="t", prompt=[Message(role="user", content="?")])
        return [RouteDecision(task, f"g{i}", 1, i, task.prompt) for i in range(n)]

    config = RunConfig.model_validate({"multi_turn": {"tool_timeout_s": 5.0}})

    async def roll_out(seconds: float, n: int) -> list[Any]:
        scheduler = build_scheduler(config, ScriptedPolicy([line % seconds, "done"]), tools)
        return await scheduler.roll_out(decisions(n))

    try:
        asyncio.run(roll_out(0.0, 1))  # the module is loaded
        began = time.monotonic()
        rollouts = asyncio.run(roll_out(1.0, 64))
        taken = time.monotonic() - began
    finally:
        isolation.close()
    assert all(not r.usage.failed_calls for r in rollouts)
    assert all((r.messages[2].content or "").startswith("rested") for r in rollouts)
    assert max(r.usage.longest_queue_s for r in rollouts) > 0
    assert all(r.usage.queue_s < r.usage.seconds for r in rollouts)
    assert taken < 3


def test_a_call_that_waits_for_a_worker_is_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_shared", ToolPool(limit=1, max_processes=1))
    env = ToolEnv(Task(task_id="t", prompt=[]), build_tools([f"{write(tmp_path)}:nap"]), tool_timeout_s=0.5)
    calls = [ToolCall(id=str(i), name="nap", arguments={"seconds": s}) for i, s in enumerate((0.3, 0.3, 9.0, 0.3))]

    async def turn() -> Any:
        await env.reset()
        try:
            return await env.step({"tool_calls": calls})
        finally:
            await env.close()

    messages, _, _, info = asyncio.run(turn())
    said = [(m.content or "").split()[0] for m in messages]
    assert said == [
        "rested",
        "rested",
        "error:",
        "rested",
    ]  # a call that hangs is ended, and blocks no other
    assert info["failed_calls"] == {"timeout": 1}
    assert sorted(info["queue_s"])[-1] > 0.6
    isolation.close()


@pytest.mark.long
def test_calls_that_compute_do_not_crowd_each_other(tmp_path: Path, pool: ToolPool) -> None:
    spins = target(write(tmp_path), "spin")

    async def many() -> int:
        works = [asyncio.create_task(pool.run(spins, {"seconds": 0.2})) for _ in range(6)]
        most = 0
        while not all(work.done() for work in works):
            most = max(most, len(pool._roster.workers("busy", "slow")))
            await asyncio.sleep(0.01)
        await asyncio.gather(*works)
        return most

    assert asyncio.run(many()) == 2


@linux
def test_workers_are_forked_and_end_with_what_they_started(tmp_path: Path, pool: ToolPool) -> None:
    async def two() -> list[str]:
        texts = await asyncio.gather(*(pool.run(target(write(tmp_path)), {"seconds": 0.05}) for _ in range(2)))
        return [text for text, _, _ in texts]

    (_, one, parent), (_, other, same) = (text.split() for text in asyncio.run(two()))
    assert parent == same != str(os.getpid())
    assert one != other
    os.kill(int(one), signal.SIGKILL)  # reaped by the zygote when the trainer asks
    until = time.monotonic() + 10
    while Path(f"/proc/{one}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{one}").exists()


@linux
def test_each_worker_carries_a_mark_of_its_own(tmp_path: Path, pool: ToolPool) -> None:
    """The mark identifies the processes it leaves running, and none of its siblings'."""

    async def environments() -> list[str]:
        path = write(tmp_path)
        hold = asyncio.create_task(pool.run(target(path), {"seconds": 0.5}))
        await asyncio.sleep(0)
        first = await pool.run(target(path, "environ"), {})
        pid = (await hold)[0].split()[1]
        (process,) = [w._process for w in pool._live_workers if str(w.pid) == pid]
        assert process is not None
        return [first[0], process.popen.mark, Path(f"/proc/{pid}/environ").read_text()]

    first, mark, second = asyncio.run(environments())
    assert f"TOOLWISE_SANDBOX={mark}" in second
    assert mark not in first
    assert "TOOLWISE_SANDBOX=" in first


@linux
@pytest.mark.parametrize(
    "top",
    [
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        "FILE = open(__file__)",
    ],
)
def test_a_module_with_threads_or_open_files_is_loaded_by_each_worker(tmp_path: Path, pool: ToolPool, top: str) -> None:
    async def two() -> list[str]:
        texts = await asyncio.gather(*(pool.run(target(write(tmp_path, top)), {"seconds": 0.3}) for _ in range(2)))
        return [text for text, _, _ in texts]

    parents = {text.split()[2] for text in asyncio.run(two())}
    assert parents == {str(os.getpid())}
    assert not pool._roster.zygotes


@linux
def test_a_place_whose_zygote_is_gone_goes_on(tmp_path: Path, pool: ToolPool) -> None:
    nap = target(write(tmp_path))

    async def one() -> str:
        return (await pool.run(nap, {"seconds": 0.0}))[0]

    first = asyncio.run(one()).split()
    os.kill(int(first[2]), signal.SIGKILL)
    os.kill(int(first[1]), signal.SIGKILL)
    until = time.monotonic() + 10
    while pool.pids() and time.monotonic() < until:
        time.sleep(0.01)
    assert asyncio.run(one()).startswith("rested")


def test_a_warm_worker_is_not_ended_during_a_long_call(
    tmp_path: Path, pool: ToolPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "IDLE_CHECK_S", 0.05)
    monkeypatch.setattr(roster, "IDLE_S", 0.2)
    sleeps = target(write(tmp_path))

    async def twice() -> list[str]:
        return [(await pool.run(sleeps, {"seconds": seconds}))[0] for seconds in (0.0, 1.0)]

    assert all(text.startswith("rested") for text in asyncio.run(twice()))


def test_idle_workers_are_ended_and_then_what_they_were_forked_from(
    tmp_path: Path, pool: ToolPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "IDLE_CHECK_S", 0.05)
    monkeypatch.setattr(roster, "IDLE_S", 0.2)
    monkeypatch.setattr(roster, "IDLE_LOADED_S", 0.4)
    asyncio.run(pool.run(target(write(tmp_path)), {"seconds": 0.0}))
    assert pool.pids()
    until = time.monotonic() + 10
    while (pool._live_workers or pool._watching) and time.monotonic() < until:
        time.sleep(0.01)
    assert not pool._live_workers
    assert not pool._roster.zygotes
    assert not pool._watching  # no watcher thread is left
    assert all(thread.name != "toolwise-tool-worker" for thread in threading.enumerate())
    asyncio.run(pool.run(target(write(tmp_path)), {"seconds": 0.0}))
