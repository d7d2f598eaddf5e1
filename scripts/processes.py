"""Runs that are processes of their own, made a few at a time and taken up again where a limit ended them.

An experiment says which jobs can be begun now (what one leaves on disk tells the next call that it is done), and this
makes them: a process each, spawned, so that nothing of one run is in another.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar


class Named(Protocol):
    """A job: what it is is its experiment's affair."""

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
    """Whether everything is done. `work(job, *more)` is called for each job that `pending` names, the most urgent
    first, until it has none and says that none will come. What is not done at the limit is ended, and made anew by the
    next call; a job that failed is not tried again, and nothing waits for it."""
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
            failed |= {job.name for job in found if job.name in ended}  # it ended, and left nothing that says so
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
