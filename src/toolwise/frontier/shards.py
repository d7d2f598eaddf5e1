"""Fills a pool with several processes: each takes every n-th row and writes its own shard, merged when all finish.

    pool.jsonl ◄─ merge ◄─ pool.0-of-4.jsonl, pool.1-of-4.jsonl, …

An interrupted evaluation resumes: shards that were left behind are merged first, then the missing rows are split again.
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
    """Moves the cells of all shards into the pool, without duplicates, and deletes the shards."""
    cells = read_cells(path, plan)
    for shard in shard_paths(path):
        new = {cell: line for cell, line in read_cells(shard, plan).items() if cell not in cells}
        append_cells(path, plan, new.values())
        cells |= new
        shard.unlink()


async def run_in_processes(
    work: str, payload: Mapping[str, Any], count: int, on_poll: Callable[[], None] = lambda: None
) -> None:
    """Calls `work` ("module:function") with (payload, number, count) in each of `count` new processes. The payload is
    sent as JSON; `on_poll` is called regularly while they run."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(
            _start_process({"path": sys.path, "work": work, "payload": payload, "of": count, "number": number})
            for number in range(count)
        )
        while any(process.poll() is None for process in processes):
            on_poll()
            await asyncio.sleep(0.2)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
            process.wait()
    codes = [process.returncode for process in processes if process.returncode]
    if codes:
        raise ToolwiseError(
            f"{len(codes)} of {count} rollout processes failed (exit code {codes[0]}): finished rollouts are kept, "
            "run the command again to resume"
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
    """Entry point of a worker process. Errors are printed as one line."""
    guard_streams()
    module, _, function = start["work"].partition(":")
    try:
        getattr(import_module(module), function)(start["payload"], start["number"], start["of"])
    except ToolwiseError as fault:
        print_error(fault)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def count_cells(paths: Sequence[Path]) -> int:
    """Number of cells written so far, to show progress; the first line of each file is its header."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in paths if path.exists())
