"""A pool that several processes fill: each has every n-th row and a file of its own, put together when all are done.

    pool.jsonl ◄─ absorb ◄─ pool.0-of-4.jsonl, pool.1-of-4.jsonl, …

Whoever is interrupted goes on: files that were left behind are absorbed first, and what is missing is shared out anew.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from toolwise.errors import ToolwiseError
from toolwise.frontier.rollout_pool import PoolPlan, append_cells, read_cells
from toolwise.terminal import guard_streams, print_error


def shard_path(path: Path, number: int, of: int) -> Path:
    return path if of == 1 else path.with_name(f"{path.stem}.{number}-of-{of}{path.suffix}")


def shard_paths(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.*-of-*{path.suffix}"))


def merge_shards(path: Path, plan: PoolPlan) -> None:
    """What lies in shares goes into the pool itself; cells that it has already are not written again."""
    known = read_cells(path, plan)
    for share in shard_paths(path):
        new = {cell: line for cell, line in read_cells(share, plan).items() if cell not in known}
        append_cells(path, plan, new.values())
        known |= new
        share.unlink()


async def run_in_processes(
    work: str, payload: Mapping[str, Any], count: int, on_poll: Callable[[], None] = lambda: None
) -> None:
    """`work`, a "module:function", with (told, number, count) in `count` fresh processes. What they are told goes as
    JSON; `on_poll` is called every now and then."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        start = {"path": sys.path, "work": work, "told": payload, "of": count}
        started.extend(_start_process({**start, "number": number}) for number in range(count))
        while any(process.poll() is None for process in started):
            on_poll()
            await asyncio.sleep(0.2)
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
            process.wait()
    codes = [process.returncode for process in started if process.returncode]
    if codes:
        raise ToolwiseError(
            f"{len(codes)} of {count} processes that rolled out failed (exit code {codes[0]}): what they made is kept, "
            "run it again to go on"
        )


def _start_process(start: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", _CHILD_SCRIPT], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(start).encode())
    return process


_CHILD_SCRIPT = """
import json, sys
start = json.load(sys.stdin)
sys.path[:] = start["path"]
from toolwise.frontier.shards import run_shard
run_shard(start)
"""


def run_shard(start: Mapping[str, Any]) -> None:
    """In a process of its own. What is wrong is one line, as everywhere."""
    guard_streams()
    module, _, function = start["work"].partition(":")
    try:
        getattr(import_module(module), function)(start["told"], start["number"], start["of"])
    except ToolwiseError as fault:
        print_error(fault)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def count_cells(paths: Sequence[Path]) -> int:
    """Cells that have been written, for whoever waits; each file's first line is its head."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in paths if path.exists())
