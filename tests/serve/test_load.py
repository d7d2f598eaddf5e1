"""Many streams at once, and many requests one after the other: no error, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from load_client import Tally, leave_early, read_stream, say_nonsense, stay_half_open

from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.serve import ServedModel, Server, ServerLimits, build_app

torch.set_num_threads(1)


def test_twenty_streams_with_bad_company() -> None:
    policy = LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=12))
    limits = ServerLimits(active=8, queued=100, head_s=0.5)
    tally, held = Tally(), list[asyncio.StreamWriter]()
    with Server(build_app(ServedModel.of(policy, "builtin:small"), limits=limits), limits=limits) as server:

        async def crowd() -> None:
            await asyncio.gather(
                *(read_stream(server.port, number, tally) for number in range(16)),
                *(read_stream(server.port, number, tally, pause_s=0.001) for number in range(4)),
                *(leave_early(server.port, number, tally) for number in range(4)),
                *(say_nonsense(server.port, number, tally) for number in range(5)),
                stay_half_open(server.port, held, tally),
            )

        asyncio.run(crowd())
        figures = figures_of(server.port)
    assert tally.outcomes == {"stream": 20, "left": 4, "refused": 5, "half-open": 1}, tally.faults
    assert (figures["requests_active"], figures["engine_blocks_in_use"]) == (0, 0)


def figures_of(port: int) -> dict[str, float]:
    """The gauges, once nothing runs."""
    for _ in range(200):
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        figures = {name: float(value) for name, value in re.findall(r"^toolwise_(\w+) (\S+)$", text, re.MULTILINE)}
        if not figures["requests_active"] and not figures["engine_blocks_in_use"]:
            break
        time.sleep(0.05)
    return figures


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """The command in a process of its own: its process and its port."""
    command = [sys.executable, "-m", "toolwise", "serve", "builtin:small", "--mode", "model", "--port", "0"]
    command += ["--set", "rollout.cache_mb=256"]  # which is full after some thousand requests, and then does not grow
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        port = int(re.search(r":(\d+)/v1", process.stdout.readline())[1])  # type: ignore[index]
        yield process.pid, port
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.long
def test_five_hundred_streams_at_once(server: tuple[int, int]) -> None:
    _, port = server
    tally = Tally()

    async def crowd() -> None:
        await asyncio.gather(*(read_stream(port, number, tally, max_tokens=64) for number in range(500)))

    asyncio.run(crowd())
    assert tally.outcomes == {"stream": 500}, tally.faults[:3]
    first = sorted(tally.first_s)
    print(f"first event: median {first[250]:.2f} s, p95 {first[475]:.2f} s, worst {first[-1]:.2f} s")


@pytest.mark.long
def test_twenty_thousand_requests_leave_nothing_behind(server: tuple[int, int]) -> None:
    pid, port = server
    tally, held = Tally(), list[asyncio.StreamWriter]()
    sizes, files = list[float](), list[int]()
    figures_of(port)
    at_start = open_files(pid)

    async def one(number: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            if number % 20 == 3:
                await say_nonsense(port, number, tally)
            elif number % 20 == 7:
                await leave_early(port, number, tally, max_tokens=64)
            elif number % 100 == 11:
                await stay_half_open(port, held, tally)
            elif number % 100 == 51:
                await read_stream(port, number, tally, pause_s=0.005, max_tokens=4)
            else:
                await read_stream(port, number, tally, max_tokens=4)

    async def play() -> None:
        gate = asyncio.Semaphore(64)
        for part in range(10):
            await asyncio.gather(*(one(2000 * part + number, gate) for number in range(2000)))
            while held:
                held.pop().close()
            figures_of(port)
            sizes.append(resident_mb(pid))
            for _ in range(100):  # until the server has noticed that the last ones hung up
                if open_files(pid) <= at_start:
                    break
                await asyncio.sleep(0.1)
            files.append(open_files(pid))

    asyncio.run(play())
    print(f"resident MB after each 2,000 requests: {[round(size) for size in sizes]}; open files: {files}")
    assert set(tally.outcomes) == {"stream", "left", "refused", "half-open"}, tally.faults[:3]
    assert sum(tally.outcomes.values()) == 20_000
    figures = figures_of(port)
    assert (figures["requests_active"], figures["requests_waiting"], figures["engine_blocks_in_use"]) == (0, 0, 0)
    assert sizes[-1] - sizes[4] < 20
    assert files == [at_start] * 10
