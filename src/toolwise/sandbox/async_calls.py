"""Runs async calls concurrently in one event loop, each with a deadline. Used in workers and by the tier `off`.

A call that blocks the loop does not use up the time of the others: the deadline clock advances by at most two ticks at
once. A call that never yields to the loop is killed from outside, together with its process.
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
"""How long a cancelled call may take to end."""
_TIMEOUT_ANSWER = {"fault": {"kind": "timeout", "message": "it took too long to answer"}}


def run_overlapping(
    harness: Harness,
    calls: Sequence[JsonDict],
    timeout_s: float,
    on_answer: Callable[[int, JsonDict], None],
    run: Callable[[Coroutine[Any, Any, bool]], bool] = asyncio.run,
) -> bool:
    """Start all calls at once and report each answer as it arrives. Returns False if any call had to be cancelled.

    `asyncio.run` waits forever for a call that ignores its cancellation. That is fine in a worker, which gets killed.
    """
    return run(_overlap(harness, calls, timeout_s, on_answer))


async def _overlap(
    harness: Harness, calls: Sequence[JsonDict], timeout_s: float, on_answer: Callable[[int, JsonDict], None]
) -> bool:
    tasks = {asyncio.create_task(_run_call(harness, position, call)): position for position, call in enumerate(calls)}
    waiting, clock, last_time = set(tasks), 0.0, time.monotonic()
    tick = min(TICK_S, timeout_s / 4)
    while waiting and clock < timeout_s:
        done, waiting = await asyncio.wait(waiting, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
        now = time.monotonic()
        clock, last_time = clock + min(now - last_time, 2 * tick), now
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
