"""Cost of running a tool in a worker process: calls per second, and the time to kill one.

python benchmarks/isolation.py
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from toolwise.concurrency.deadlines import run
from toolwise.config.imports import load_reference
from toolwise.tools.function import FunctionTool
from toolwise.tools.isolation.code_location import ObjectRef
from toolwise.tools.isolation.tool_pool import ToolPool

TOOLS = """
import time
def add(a: int, b: int) -> int:
    return a + b
def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"
"""
CALLS = 2_000


async def rate(call: Callable[[], Awaitable[object]], at_once: int, calls: int) -> float:
    """Calls per second with `at_once` concurrent callers."""

    async def caller() -> None:
        for _ in range(calls // at_once):
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return calls // at_once * at_once / (time.perf_counter() - began)


async def main(path: Path) -> None:
    add, nap = (load_reference(f"{path}:{name}", what="tool") for name in ("add", "nap"))
    arguments = {"a": 1, "b": 2}
    target, sleeps = ObjectRef.of(add), ObjectRef.of(nap)
    thread = FunctionTool(add, isolate=False)
    print(f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores; {CALLS:,} calls of a function that adds")
    print(f"in threads, 8 at once:      {await rate(lambda: thread.execute('i', arguments), 8, CALLS):>8,.0f} calls/s")
    for workers in (1, 2, 4, 8):
        await throughput(workers, target, sleeps)
    await blocking(sleeps)
    await kills(sleeps)


async def throughput(workers: int, target: ObjectRef, sleeps: ObjectRef) -> None:
    pool = ToolPool(limit=workers)
    began = time.perf_counter()
    await asyncio.gather(*(pool.run(sleeps, {"seconds": 0.01}) for _ in range(workers)))
    up_s = time.perf_counter() - began
    busy = await rate(lambda: pool.run(target, {"a": 1, "b": 2}), workers, CALLS)
    naps = await rate(lambda: pool.run(sleeps, {"seconds": 0.02}), workers, 20 * workers)
    memory_mb = statistics.mean(map(own_memory_mb, pool.pids()))
    pool.close()
    print(f"in {workers} worker process{'es' * (workers > 1):<2}:     {busy:>8,.0f} calls/s", end="; ")
    print(f"naps of 20 ms: {naps:,.0f} calls/s of {50 * workers}; all up in {up_s:.2f} s, {memory_mb:.0f} MB each")


async def blocking(sleeps: ObjectRef) -> None:
    """Time and worker memory of 64 concurrent calls of a tool that blocks for 1 s."""
    pool = ToolPool()
    await pool.run(sleeps, {"seconds": 0.0})
    began = time.perf_counter()
    await asyncio.gather(*(pool.run(sleeps, {"seconds": 1.0}) for _ in range(64)))
    taken_s, pids = time.perf_counter() - began, pool.pids()
    resident, proportional = (sum(memory_mb(pid, kind) for pid in pids) / len(pids) for kind in ("Rss:", "Pss:"))
    pool.close()
    print(
        f"64 calls of 1 s:            {taken_s:>8.2f} s in {len(pids)} workers, {resident:.0f} MB resident each, of",
        end=" ",
    )
    print(f"which {proportional:.1f} MB are its own (PSS), {proportional * len(pids):.0f} MB in all")


def own_memory_mb(pid: int) -> float:
    """Private memory of a process."""
    return memory_mb(pid, "Private")


def memory_mb(pid: int, kind: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


async def kills(target: ObjectRef) -> None:
    """Cancel a hanging call: time until its caller continues, its process is gone, and the next worker is warm."""
    pool = ToolPool(limit=1)
    await pool.run(target, {"seconds": 0.0})
    freed, gone, warm = [], [], []
    for _ in range(10):
        [pid] = pool.pids()
        hanging = asyncio.create_task(pool.run(target, {"seconds": 1000.0}))
        await asyncio.sleep(0.02)
        began = time.perf_counter()
        hanging.cancel()
        await asyncio.wait({hanging})
        freed.append(time.perf_counter() - began)
        while pid in pool.pids():  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
        gone.append(time.perf_counter() - began)
        await pool.run(target, {"seconds": 0.0})
        warm.append(time.perf_counter() - began)
    pool.close()
    words = ("its caller goes on after", "its process is gone after", "the next has answered after")
    for word, taken in zip(words, (freed, gone, warm), strict=True):
        print(f"a call is killed: {word} {statistics.median(taken) * 1e3:.1f} ms (worst {max(taken) * 1e3:.1f} ms)")
    print(f"load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tools.py"
        path.write_text(TOOLS)
        run(main(path))
