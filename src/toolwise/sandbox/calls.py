"""Many calls over few workers: sent together, told apart when something dies, so that only the culprit is blamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.pool import Pool
from toolwise.sandbox.targets import Target

TOGETHER = 32
"""Pointwise calls that are sent to a worker at once."""
OVERLAPPING = 64
"""Async ones that run in a worker at the same time."""

Plain = dict[str, Any]


def run_batch(pool: Pool, target: Target, batch: Plain, timeout_s: float) -> list[Any] | None:
    """One call of a batch or group function; None where the function turns out to be pointwise.

    Whatever goes wrong with it goes wrong for the whole batch.
    """
    count = len(batch["calls"])
    with pool.worker(target) as worker:
        if worker.signature is None or worker.signature.mode == "pointwise":
            return None
        (answers,) = worker.call({"batch": batch}, 1, timeout_s, time.monotonic() + timeout_s)
        if len(answers) != count:
            raise WorkerFault("wrong_length", f"the worker sent {len(answers)} results for {count} rollouts")
        return answers


def run_pointwise(
    pool: Pool,
    target: Target,
    calls: Sequence[Plain],
    timeout_s: float,
    threads: Callable[[], ThreadPoolExecutor],
    *,
    overlap: bool = False,
) -> list[Any]:
    """One answer a call, in order. Each call has `timeout_s`, and those sent together the sum of it; `overlap` runs
    those of an async function at the same time."""
    run = run_overlapping if overlap else run_together
    each = OVERLAPPING if overlap else TOGETHER
    if not overlap and 1 < len(calls) < TOGETHER * pool.workers:
        each = -(-len(calls) // pool.workers)
    parts = [calls[start : start + each] for start in range(0, len(calls), each)]
    if len(parts) == 1:
        return run(pool, target, calls, timeout_s)
    waiting = list(enumerate(parts))[::-1]
    done: dict[int, list[Any]] = {}

    def work() -> None:
        while waiting:
            try:
                number, part = waiting.pop()
            except IndexError:
                return
            done[number] = run(pool, target, part, timeout_s)

    helpers = [threads().submit(work) for _ in range(min(pool.workers, len(parts)) - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():  # one that has not begun has nothing left to do
            helper.result()
    return [answer for number in range(len(parts)) for answer in done[number]]


def run_overlapping(pool: Pool, target: Target, calls: Sequence[Plain], timeout_s: float) -> list[Any]:
    """Calls of an async function at the same time in one worker; after a death, those without an answer one by one,
    since nobody can tell which of them it was."""
    answers: dict[int, Any] = {}
    until = time.monotonic() + timeout_s * len(calls)
    try:
        with pool.worker(target) as worker:
            for position, got in worker.call_overlapping(calls, timeout_s, until):
                if len(got) != 1:
                    raise WorkerFault("wrong_length", f"the worker sent {len(got)} results for one rollout")
                answers[position] = got[0]
    except WorkerFault as fault:
        if fault.loading:
            return [_told(fault)] * len(calls)
    for position, call in enumerate(calls):
        if position not in answers:
            answers[position] = run_together(pool, target, [call], timeout_s)[0]
    return [answers[position] for position in range(len(calls))]


def run_together(pool: Pool, target: Target, calls: Sequence[Plain], timeout_s: float) -> list[Any]:
    """Calls in one frame; after a death, the rest one by one in fresh workers."""
    until = time.monotonic() + timeout_s * len(calls)
    answers: list[Any] = []
    alone = len(calls) == 1
    while len(answers) < len(calls):
        begun = len(answers)
        part = calls[begun : begun + 1] if alone else calls[begun:]
        asked = time.monotonic()
        try:
            with pool.worker(target) as worker:
                until += time.monotonic() - asked  # waiting for a worker is not the function's time
                for got in worker.call({"calls": part}, len(part), timeout_s, until):
                    if len(got) != 1:
                        raise WorkerFault("wrong_length", f"the worker sent {len(got)} results for one rollout")
                    answers += got
        except WorkerFault as fault:
            if fault.loading:
                return answers + [_told(fault)] * (len(calls) - len(answers))
            suspect_is_alone = len(part) == 1 or fault.kind == "timeout"
            if suspect_is_alone or time.monotonic() >= until:
                answers.append(_told(fault))
            alone = True
    return answers


def _told(fault: WorkerFault) -> Plain:
    return {"fault": {"kind": fault.kind, "message": fault.message, "traceback": fault.traceback}}
