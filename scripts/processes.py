"""Run the jobs of an experiment in separate processes, a few at a time, within a time limit.

The experiment names the jobs that can start now; results on disk tell the next call which are done. Processes are
spawned, so that runs share no state.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar


class Named(Protocol):
    """A job; its content is up to the experiment."""

    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Named)


def run_all(
    pending: Callable[[], tuple[Sequence[J], bool]],
    work: Callable[..., None],
    *more: Any,
    jobs: int,
    limit_s: float,
) -> bool:
    """Call `work(job, *more)` for each job that `pending` names, most urgent first, until it reports that no more will
    come. Returns whether everything is done. Jobs still running at the limit are ended and repeated by the next call; a
    failed job is not retried, and nothing waits for it."""
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    running: dict[str, Any] = {}
    ended: set[str] = set()
    failed: set[str] = set()
    try:
        while time.monotonic() - began < limit_s:
            for name in [name for name, process in running.items() if not process.is_alive()]:
                process = running.pop(name)
                ended.add(name)
                if process.exitcode:
                    failed.add(name)
                print(f"{time.monotonic() - began:6.1f} s  {name}: {process.exitcode or 'done'}", flush=True)
            found, last = pending()
            failed |= {job.name for job in found if job.name in ended}  # it ended without a result
            ready = [job for job in found if job.name not in failed and job.name not in running]
            if (last or failed) and not ready and not running:
                return not failed
            for job in ready[: jobs - len(running)]:
                running[job.name] = spawn.Process(target=work, args=(job, *more), name=job.name)
                running[job.name].start()
            time.sleep(0.3)
        return False
    finally:
        for process in running.values():
            process.terminate()
            process.join()
