"""Waiting for a sandbox worker does not count as the reward function's time, not even on a retry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toolwise.sandbox.dispatch import run_in_one_frame
from toolwise.sandbox.faults import WorkerFault


class BusyPool:
    """Its first worker dies in the first call; the next is free only after a while."""

    workers = 1

    def __init__(self, wait_s: float) -> None:
        self.wait_s, self.given = wait_s, 0

    @contextmanager
    def worker(self, target: Any, *, fresh: bool = False) -> Iterator[Any]:
        self.given += 1
        if self.given > 1:
            time.sleep(self.wait_s)
        yield self

    def call(self, request: dict[str, Any], count: int, timeout_s: float, until: float) -> Iterator[list[Any]]:
        if self.given == 1:
            raise WorkerFault("died", "it died")
        for _ in range(count):
            if time.monotonic() > until:
                raise WorkerFault("timeout", "it took too long to answer")
            yield [{"result": {"score": 1.0}}]


def test_after_a_death_the_wait_for_another_worker_is_not_charged() -> None:
    pool: Any = BusyPool(wait_s=0.5)
    answers = run_in_one_frame(pool, Any, [{}, {}], 0.1)  # type: ignore[arg-type]
    assert answers == [{"result": {"score": 1.0}}] * 2
