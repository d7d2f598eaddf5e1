"""Async calls that overlap in one event loop, each with a deadline, inside a worker or in the tier `off`.

Time in which one call keeps the loop busy is not charged to the others: the clock of the deadlines advances by no more
than two ticks at once. A call that never lets the loop go is ended from outside, with its process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from toolwise.sandbox.output import current_call

if TYPE_CHECKING:
    from toolwise.sandbox.harness import Harness, JsonDict

TICK_S = 0.05
CANCEL_GRACE_S = 0.2
"""How long a call that was cancelled may take to end."""
_TIMEOUT_ANSWER = {"fault": {"kind": "timeout", "message": "it took too long to answer"}}


def run_overlapping(
    harness: Harness,
    calls: Sequence[JsonDict],
    timeout_s: float,
    on_answer: Callable[[int, JsonDict], None],
    run: Callable[[Coroutine[Any, Any, bool]], bool] = asyncio.run,
) -> bool:
    """Calls all of them at once and tells each answer as it comes. False where one had to be cancelled.

    `asyncio.run` waits for ever for a call that ignores its cancellation: fit for a worker, whose process is ended.
    """
    return run(_overlap(harness, calls, timeout_s, on_answer))


async def _overlap(
    harness: Harness, calls: Sequence[JsonDict], timeout_s: float, on_answer: Callable[[int, JsonDict], None]
) -> bool:
    tasks = {asyncio.create_task(_run_call(harness, position, call)): position for position, call in enumerate(calls)}
    waiting, clock, before = set(tasks), 0.0, time.monotonic()
    tick = min(TICK_S, timeout_s / 4)
    while waiting and clock < timeout_s:
        done, waiting = await asyncio.wait(waiting, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
        now = time.monotonic()
        clock, before = clock + min(now - before, 2 * tick), now
        for task in sorted(done, key=tasks.__getitem__):
            on_answer(tasks[task], task.result())
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting, timeout=CANCEL_GRACE_S)
    for task in sorted(waiting, key=tasks.__getitem__):
        on_answer(tasks[task], _TIMEOUT_ANSWER)
    return not waiting


async def _run_call(harness: Harness, position: int, call: JsonDict) -> JsonDict:
    current_call.set(position)
    return await harness.call_one_async(call)
