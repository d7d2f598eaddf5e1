"""Reads the prompts of the next step on a core that is free, while the router learns from this one.

What the head sees of a prompt depends on the trunk's weights, so it is only known once the actor has been updated; from
then on until the next step's routes nothing else needs it. The trunk must not change meanwhile: whoever updates it
asks for the routes, and so waits for this, before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

Prompts = Sequence[Sequence[int]]


def has_free_core() -> bool:
    """Whether a second thread can compute as this one does without taking anything from it."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return cores >= 2 * torch.get_num_threads()


class ReadAhead:
    """The features of the next prompts: planned while there is time, read in a thread, taken once."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._known: list[tuple[int, ...]] = []
        self._read: Callable[[], Tensor] | None = None
        """Reads what was planned."""
        self._reading: Future[Tensor] | None = None

    def plan(self, prompts: Prompts, read: Callable[[], Tensor]) -> None:
        """`read` will give the features of these prompts; what was planned before is forgotten."""
        self.take(())
        self._known, self._read = [tuple(prompt) for prompt in prompts], read

    def start(self) -> None:
        """Start to read what was planned, if anything was."""
        if self._read is not None and self._reading is None:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="toolwise-router")
            self._reading = self._pool.submit(_run, self._read, torch.get_num_threads())

    def take(self, prompts: Prompts) -> Tensor | None:
        """The features of these prompts, if it was they that were read and nothing went wrong. Waits until nothing is
        being read any more."""
        reading, known, self._reading, self._read, self._known = self._reading, self._known, None, None, []
        if reading is None or reading.exception() is not None or known != [tuple(prompt) for prompt in prompts]:
            return None
        return reading.result()


def _run(read: Callable[[], Tensor], threads: int) -> Tensor:
    torch.set_num_threads(threads)  # of this thread: with as many, the bits are the same
    return read()
