"""Saves checkpoints beside the training: the state is copied while the next rollouts run, then written by a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.concurrency.memory import available_memory
from toolwise.errors import CheckpointError
from toolwise.protocols import Metrics
from toolwise.training.checkpoint.loader import Checkpoint

if TYPE_CHECKING:
    from toolwise.training.checkpoint.snapshot import FrozenState

log = logging.getLogger("toolwise.training.checkpoint")

MAX_MEMORY_SHARE = 0.8
"""Copies may take this share of the memory that is available; a larger state is written without copying it."""
GRACE_S, ABANDON_S = 1.0, 5.0
"""How long a write may still take when the run is stopped immediately, and after that, to notice that it is over."""

Write = Callable[[Any, Callable[[], bool]], Checkpoint]
"""Writes a state; the second argument says whether the write was abandoned."""


@dataclass(slots=True)
class _Save:
    """One save in its thread."""

    frozen: FrozenState | None
    write: Write
    copied: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    result: Checkpoint | None = None
    error: BaseException | None = None


class BackgroundSaver:
    """One save at a time. The caller keeps the tensors unchanged until `wait_for_copy` returns, and collects each
    result, or its error, with `take_result`. Without `background`, `start` returns when all is written."""

    def __init__(self, *, background: bool = True) -> None:
        from toolwise.training.checkpoint.snapshot import TensorCopies  # imports torch

        self.background = background
        self._copies = TensorCopies()
        self._save: _Save | None = None
        self._times: dict[str, float] = {}

    def start(self, state: Any, write: Write) -> None:
        """Save `state`: nested dicts, lists and tuples. The result of the save before must have been taken."""
        from toolwise.training.checkpoint.snapshot import freeze

        assert self._save is None, "the result of the last save was not taken"
        with self._timed("copy"):
            frozen = freeze(state) if self.background else None
            if frozen is not None and not self._fits(frozen):
                frozen = None
        if frozen is None:
            with self._timed("wait"):
                self._save = _Save(None, write, result=write(state, lambda: False))
            return
        self._save = save = _Save(frozen, write)
        save.thread = threading.Thread(target=self._run, args=(save,), name="toolwise-checkpoint", daemon=True)
        save.thread.start()

    def wait_for_copy(self) -> None:
        """Return when the tensors may change."""
        if self._save is not None and self._save.thread is not None:
            with self._timed("copy"):
                self._save.copied.wait()

    def take_result(self, *, wait: bool) -> Checkpoint | None:
        """The last save's checkpoint, once; raises its error. None if there is none, or without `wait` not yet."""
        save = self._save
        if save is None or (save.thread is not None and save.thread.is_alive() and not wait):
            return None
        if save.thread is not None:
            with self._timed("wait"):
                save.thread.join()
        self._save = None
        if save.error is not None:
            raise save.error
        return save.result

    def take_metrics(self) -> Metrics:
        """Seconds that saves have held up the caller since the last call; empty if there were none."""
        times, self._times = self._times, {}
        return {f"time/checkpoint_{name}_s": seconds for name, seconds in times.items()}

    def abandon(self) -> bool:
        """Stop a write that is under way and does not end soon; return whether nothing is written any more."""
        save, self._save = self._save, None
        if save is None or save.thread is None:
            return True
        save.thread.join(GRACE_S)
        save.abandoned.set()
        save.thread.join(ABANDON_S)
        return not save.thread.is_alive()

    def _run(self, save: _Save) -> None:
        assert save.frozen is not None
        try:
            try:
                state = self._copies.copy(save.frozen)
            except (RuntimeError, MemoryError) as error:
                raise CheckpointError(
                    f"cannot copy the run's state for a checkpoint ({str(error).splitlines()[0]}): set "
                    "trainer.async_checkpoints = false to write it without a copy"
                ) from error
            save.copied.set()
            save.frozen = None
            save.result = save.write(state, save.abandoned.is_set)
        except BaseException as error:  # raised where the result is taken
            save.error = error
        finally:
            save.copied.set()

    def _fits(self, frozen: FrozenState) -> bool:
        """Whether there is memory for the copies; if not, checkpoints are written without them from now on."""
        needed, available = self._copies.missing_bytes(frozen), available_memory()
        if available is None or needed <= MAX_MEMORY_SHARE * available:
            return True
        self.background = False
        log.warning(
            "checkpoints are written while training waits: a copy of the state needs %.1f GB of memory and %.1f GB are "
            "available",
            needed / 1e9,
            available / 1e9,
        )
        return False

    def _timed(self, name: str) -> _Timer:
        return _Timer(self._times, name)


class _Timer:
    def __init__(self, times: dict[str, float], name: str) -> None:
        self._times, self._name = times, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._times[self._name] = self._times.get(self._name, 0.0) + time.perf_counter() - self._start
