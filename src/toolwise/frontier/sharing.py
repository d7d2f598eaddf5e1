"""A pool that several processes fill: each has every n-th row and a file of its own, put together when all are done.

    pool.jsonl ◄─ absorb ◄─ pool.0-of-4.jsonl, pool.1-of-4.jsonl, …

Whoever is interrupted goes on: files that were left behind are absorbed first, and what is missing is shared out anew.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolwise.errors import ToolwiseError
from toolwise.frontier.pool import Plan, read_cells, write_cells


def share_of(path: Path, number: int, of: int) -> Path:
    return path if of == 1 else path.with_name(f"{path.stem}.{number}-of-{of}{path.suffix}")


def shares_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.*-of-*{path.suffix}"))


def absorb(path: Path, plan: Plan) -> None:
    """What lies in shares goes into the pool itself; cells that it has already are not written again."""
    known = read_cells(path, plan)
    for share in shares_of(path):
        new = {cell: line for cell, line in read_cells(share, plan).items() if cell not in known}
        write_cells(path, plan, new.values())
        known |= new
        share.unlink()


async def in_processes(
    work: Callable[..., None], arguments: Sequence[Any], count: int, waiting: Callable[[], None] = lambda: None
) -> None:
    """`work(*arguments, number, count)` in `count` fresh processes; `waiting` is called every now and then."""
    context = multiprocessing.get_context("spawn")  # torch does not like to be forked
    started = [
        context.Process(target=_guarded, args=(work, (*arguments, number, count)), daemon=True)
        for number in range(count)
    ]
    try:
        for process in started:
            process.start()
        while any(process.is_alive() for process in started):
            waiting()
            await asyncio.sleep(0.2)
    finally:
        for process in started:
            if process.pid is not None and process.is_alive():
                process.terminate()
            if process.pid is not None:
                process.join()
    codes = [process.exitcode for process in started if process.exitcode]
    if codes:
        raise ToolwiseError(
            f"{len(codes)} of {count} processes that rolled out failed (exit code {codes[0]}): what they made is kept, "
            "run it again to go on"
        )


def _guarded(work: Callable[..., None], arguments: Sequence[Any]) -> None:
    """What is wrong is one line, as everywhere."""
    try:
        work(*arguments)
    except ToolwiseError as fault:
        print(f"toolwise: {fault}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def lines_in(paths: Sequence[Path]) -> int:
    """Cells that have been written, for whoever waits; each file's first line is its head."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in paths if path.exists())
