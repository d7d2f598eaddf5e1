"""Distributes many calls over few workers. Calls are sent together and split up after a failure to find the culprit."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.pool import Pool
from toolwise.sandbox.targets import Target

CALLS_PER_FRAME = 32
MAX_OVERLAPPING_CALLS = 64
"""Async calls that run concurrently in one worker."""
SPLIT = 8
"""Unanswered calls are split into this many parts to find the culprit: 64 calls need at most two more attempts."""

log = logging.getLogger("toolwise.sandbox")
_warned: set[str] = set()

JsonDict = dict[str, Any]


def run_batch(pool: Pool, target: Target, batch: JsonDict, timeout_s: float) -> list[Any] | None:
    """Make one call of a batch or group function. Returns None if the function turns out to be pointwise.

    A failure applies to the whole batch.
    """
    count, retried = len(batch["calls"]), False
    while True:
        try:
            with pool.worker(target, fresh=retried) as worker:
                if worker.signature is None or worker.signature.mode == "pointwise":
                    return None
                (answers,) = worker.call({"batch": batch}, 1, timeout_s, time.monotonic() + timeout_s)
                if len(answers) != count:
                    raise WorkerFault("wrong_length", f"the worker sent {len(answers)} results for {count} rollouts")
                return answers
        except WorkerFault as fault:
            if retried or fault.loading or not fault.not_received or pool.closed:
                raise
            retried = True


def run_pointwise(
    pool: Pool,
    target: Target,
    calls: Sequence[JsonDict],
    timeout_s: float,
    threads: ThreadPoolExecutor,
    *,
    overlap: bool = False,
) -> list[Any]:
    """One answer per call, in order. Each call has `timeout_s`; calls sent together share the sum.

    `overlap` runs the calls of an async function concurrently; those left without an answer run again in smaller parts.
    """
    max_size = MAX_OVERLAPPING_CALLS if overlap else CALLS_PER_FRAME
    waiting = _parts(range(len(calls)), pool.workers, max_size)
    answers: dict[int, Any] = {}
    helpers: list[Future[None]] = []

    def get_help(parts: int) -> None:
        with suppress(RuntimeError):  # the sandbox is closed; the caller notices
            helpers.extend(threads.submit(work) for _ in range(min(pool.workers, parts) - 1))

    def work() -> None:
        while waiting:
            try:
                part = waiting.pop()
            except IndexError:
                return
            batch = [calls[position] for position in part]
            if not overlap or len(part) == 1:
                answers.update(zip(part, run_in_one_frame(pool, target, batch, timeout_s), strict=True))
                continue
            part_answers = run_overlapping_calls(pool, target, batch, timeout_s)
            answers.update((part[offset], answer) for offset, answer in part_answers.items())
            retries = _parts(
                [position for offset, position in enumerate(part) if offset not in part_answers], SPLIT, max_size
            )
            waiting.extend(retries)
            get_help(len(retries))

    get_help(len(waiting))
    work()
    while helpers:
        helper = helpers.pop()
        if not helper.cancel():  # a helper that has not started has nothing left to do
            helper.result()
    return [answers[position] for position in range(len(calls))]


def _parts(positions: Sequence[int], count: int, max_size: int) -> list[Sequence[int]]:
    """Split into `count` parts, or more if a part would exceed `max_size`. Reversed, so that pop() gives the first."""
    size = min(max_size, -(-len(positions) // count)) or 1
    return [positions[start : start + size] for start in range(0, len(positions), size)][::-1]


def run_overlapping_calls(pool: Pool, target: Target, calls: Sequence[JsonDict], timeout_s: float) -> dict[int, Any]:
    """Run calls of an async function concurrently in one worker. Returns the answers by position.

    Answers are missing if a call killed or blocked the worker, or changed state that all of them share: it is then
    unknown which call did it.
    """
    answers: dict[int, Any] = {}
    try:
        with pool.worker(target) as worker:
            until = time.monotonic() + timeout_s * len(calls)
            for position, results in worker.call_overlapping(calls, timeout_s, until):
                answers[position] = _only_answer(results)
    except WorkerFault as fault:
        if fault.loading:
            return dict.fromkeys(range(len(calls)), _fault_answer(fault))
        return answers
    if len(answers) < len(calls) and target.reference not in _warned:
        _warned.add(target.reference)
        log.warning(
            "reward %s: a call changed modules, environment variables or the import path, which concurrent async calls "
            "share; affected calls are run again separately, which takes longer (reported once)",
            target.reference,
        )
    return answers


def run_in_one_frame(pool: Pool, target: Target, calls: Sequence[JsonDict], timeout_s: float) -> list[Any]:
    """Send calls in one frame. After a worker dies, run the rest one by one in fresh workers.

    A call that never reached its worker is retried once.
    """
    until = time.monotonic() + timeout_s * len(calls)
    answers: list[Any] = []
    one_by_one, retried_at = len(calls) == 1, -1
    while len(answers) < len(calls):
        start = len(answers)
        part = calls[start : start + 1] if one_by_one else calls[start:]
        requested_at = time.monotonic()
        try:
            with pool.worker(target, fresh=retried_at == start) as worker:
                until += time.monotonic() - requested_at  # time spent waiting for a worker does not count
                for results in worker.call({"calls": part}, len(part), timeout_s, until):
                    answers += [_only_answer(results)]
        except WorkerFault as fault:
            if fault.loading:
                return answers + [_fault_answer(fault)] * (len(calls) - len(answers))
            if fault.not_received and retried_at != len(answers) and not pool.closed:
                retried_at = len(answers)
                until += time.monotonic() - requested_at
                continue
            is_culprit_known = len(part) == 1 or fault.kind == "timeout"
            if is_culprit_known or time.monotonic() >= until:
                answers.append(_fault_answer(fault))
            one_by_one = True
    return answers


def _only_answer(results: list[Any]) -> Any:
    if len(results) != 1:
        raise WorkerFault("wrong_length", f"the worker sent {len(results)} results for one rollout")
    return results[0]


def _fault_answer(fault: WorkerFault) -> JsonDict:
    return {"fault": {"kind": fault.kind, "message": fault.message, "traceback": fault.traceback}}
