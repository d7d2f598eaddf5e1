"""Many calls over few workers: sent together, told apart when something dies, so that only the culprit is blamed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.pool import Pool
from toolwise.sandbox.targets import Target

CALLS_PER_FRAME = 32
"""Pointwise calls that are sent to a worker at once."""
MAX_OVERLAPPING_CALLS = 64
"""Async ones that run in a worker at the same time."""
SPLIT = 8
"""Parts into which those without an answer are split to find the culprit: 64 calls take two more attempts at most."""

log = logging.getLogger("toolwise.sandbox")
_said: set[str] = set()

JsonDict = dict[str, Any]


def run_batch(pool: Pool, target: Target, batch: JsonDict, timeout_s: float) -> list[Any] | None:
    """One call of a batch or group function; None where the function turns out to be pointwise.

    Whatever goes wrong with it goes wrong for the whole batch.
    """
    try:
        return _run_batch(pool, target, batch, timeout_s, fresh=False)
    except WorkerFault as fault:
        if fault.loading or not fault.not_received or pool.closed:
            raise
        return _run_batch(pool, target, batch, timeout_s, fresh=True)


def _run_batch(pool: Pool, target: Target, batch: JsonDict, timeout_s: float, *, fresh: bool) -> list[Any] | None:
    count = len(batch["calls"])
    with pool.worker(target, fresh=fresh) as worker:
        if worker.signature is None or worker.signature.mode == "pointwise":
            return None
        (answers,) = worker.call({"batch": batch}, 1, timeout_s, time.monotonic() + timeout_s)
        if len(answers) != count:
            raise WorkerFault("wrong_length", f"the worker sent {len(answers)} results for {count} rollouts")
        return answers


def run_pointwise(
    pool: Pool,
    target: Target,
    calls: Sequence[JsonDict],
    timeout_s: float,
    threads: Callable[[], ThreadPoolExecutor],
    *,
    overlap: bool = False,
) -> list[Any]:
    """One answer a call, in order. Each call has `timeout_s`, and those sent together the sum of it; `overlap` runs
    those of an async function at the same time. What then stays without an answer runs again in smaller parts."""
    most = MAX_OVERLAPPING_CALLS if overlap else CALLS_PER_FRAME
    waiting = _parts(range(len(calls)), pool.workers, most)
    answers: dict[int, Any] = {}
    helpers: list[Future[None]] = []

    def get_help(parts: int) -> None:
        with suppress(RuntimeError):  # the sandbox is closed: whoever asked finds out
            helpers.extend(threads().submit(work) for _ in range(min(pool.workers, parts) - 1))

    def work() -> None:
        while waiting:
            try:
                part = waiting.pop()
            except IndexError:
                return
            together = [calls[position] for position in part]
            if not overlap or len(part) == 1:
                answers.update(zip(part, run_in_one_frame(pool, target, together, timeout_s), strict=True))
                continue
            found = run_overlapping_calls(pool, target, together, timeout_s)
            answers.update((part[at], answer) for at, answer in found.items())
            again = _parts([position for at, position in enumerate(part) if at not in found], SPLIT, most)
            waiting.extend(again)
            get_help(len(again))

    get_help(len(waiting))
    work()
    while helpers:
        helper = helpers.pop()
        if not helper.cancel():  # one that has not begun has nothing left to do
            helper.result()
    return [answers[position] for position in range(len(calls))]


def _parts(positions: Sequence[int], count: int, most: int) -> list[Sequence[int]]:
    """As many as `count` parts, or more where they would be larger than `most`; the first is last."""
    each = min(most, -(-len(positions) // count)) or 1
    return [positions[start : start + each] for start in range(0, len(positions), each)][::-1]


def run_overlapping_calls(pool: Pool, target: Target, calls: Sequence[JsonDict], timeout_s: float) -> dict[int, Any]:
    """Calls of an async function at the same time in one worker: the answers by position.

    Some are missing where one of the calls ended or blocked the worker, or changed what all of them share: nobody can
    tell which of them it was.
    """
    answers: dict[int, Any] = {}
    try:
        with pool.worker(target) as worker:
            until = time.monotonic() + timeout_s * len(calls)
            for position, got in worker.call_overlapping(calls, timeout_s, until):
                if len(got) != 1:
                    raise WorkerFault("wrong_length", f"the worker sent {len(got)} results for one rollout")
                answers[position] = got[0]
    except WorkerFault as fault:
        if fault.loading:
            return dict.fromkeys(range(len(calls)), _fault_answer(fault))
        return answers
    if len(answers) < len(calls) and target.reference not in _said:
        _said.add(target.reference)
        log.warning(
            "reward %s: a call changed modules, the environment or the import path that its worker's async calls "
            "share; such calls are run again apart, which takes longer (said once)",
            target.reference,
        )
    return answers


def run_in_one_frame(pool: Pool, target: Target, calls: Sequence[JsonDict], timeout_s: float) -> list[Any]:
    """Calls in one frame; after a death, the rest one by one in fresh workers. A call that never reached its worker has
    one more attempt."""
    until = time.monotonic() + timeout_s * len(calls)
    answers: list[Any] = []
    alone, again = len(calls) == 1, -1
    while len(answers) < len(calls):
        begun = len(answers)
        part = calls[begun : begun + 1] if alone else calls[begun:]
        asked = time.monotonic()
        try:
            with pool.worker(target, fresh=again == begun) as worker:
                until += time.monotonic() - asked  # waiting for a worker is not the function's time
                for got in worker.call({"calls": part}, len(part), timeout_s, until):
                    if len(got) != 1:
                        raise WorkerFault("wrong_length", f"the worker sent {len(got)} results for one rollout")
                    answers += got
        except WorkerFault as fault:
            if fault.loading:
                return answers + [_fault_answer(fault)] * (len(calls) - len(answers))
            if fault.not_received and again != len(answers) and not pool.closed:
                again = len(answers)
                until += time.monotonic() - asked
                continue
            suspect_is_alone = len(part) == 1 or fault.kind == "timeout"
            if suspect_is_alone or time.monotonic() >= until:
                answers.append(_fault_answer(fault))
            alone = True
    return answers


def _fault_answer(fault: WorkerFault) -> JsonDict:
    return {"fault": {"kind": fault.kind, "message": fault.message, "traceback": fault.traceback}}
