"""Endless seeded batches of tasks for the training loop, resumable at the exact position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from toolwise.data.mixture import mixture_order, shuffled
from toolwise.data.task_set import Indices, TaskSet, fingerprint
from toolwise.errors import CheckpointError, ConfigError
from toolwise.types import Task

NO_TASKS = "no tasks; give a file with at least one row"


class Batches(Iterator[list[Task]]):
    """Each epoch is a new permutation that depends only on (seed, epoch), so the state is two numbers.

    Tasks from sources with weights are drawn in these shares: an epoch has as many tasks as all sources together.
    Without `drop_last` the last batch of an epoch may be short; no batch spans two epochs.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        too_large = (
            f"batch_size {batch_size} is more than the {len(tasks)} tasks, and drop_last drops short batches; lower "
            "batch_size or set drop_last to false"
        )
        for is_wrong, problem in (
            (not tasks, NO_TASKS),
            (batch_size < 1, f"batch_size is {batch_size}; it must be at least 1"),
            (drop_last and batch_size > len(tasks), too_large),
            (seed < 0, f"seed is {seed}; it must be 0 or more"),
        ):
            if is_wrong:
                raise ConfigError(problem)
        self.tasks: Sequence[Task] = tasks if isinstance(tasks, TaskSet) else list(tasks)
        self._mixture = tasks.mixture if isinstance(tasks, TaskSet) else []
        self._batch_size, self._drop_last = batch_size, drop_last
        self._seed, self._shuffle = seed, shuffle
        self._fingerprint = fingerprint(tasks)
        self.epoch = self._position = 0
        self._order = self._permutation(0)

    @property
    def batches_per_epoch(self) -> int:
        return (math.floor if self._drop_last else math.ceil)(len(self.tasks) / self._batch_size)

    @property
    def next_size(self) -> int:
        """Number of tasks in the next batch."""
        return min(self._batch_size, len(self.tasks) - (0 if self._is_at_end else self._position))

    @property
    def _is_at_end(self) -> bool:
        """Whether the next batch is of the next epoch."""
        return len(self.tasks) - self._position < (self._batch_size if self._drop_last else 1)

    def __next__(self) -> list[Task]:
        if self._is_at_end:
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._permutation(self.epoch)
        indices = self._order[self._position : self._position + self._batch_size].tolist()
        self._position += len(indices)
        return [self.tasks[i] for i in indices]

    def upcoming(self) -> Iterator[Task]:
        """The tasks of the next batch, built one by one and without going on to it; none at the end of an epoch."""
        if not self._is_at_end:
            yield from (self.tasks[i] for i in self._order[self._position : self._position + self._batch_size].tolist())

    def state_dict(self) -> dict[str, Any]:
        """`position` counts tasks, not batches, so that a run can resume with a different batch size."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **({"mixture": [list(part) for part in self._mixture]} if self._mixture else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("fingerprint") != self._fingerprint:
            raise CheckpointError(
                f"the checkpoint was made with other data: its task ids differ from those of the "
                f"{len(self.tasks)} current tasks; resume with the data file and limit of the first run"
            )
        for name, current in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state.get(name) != current:
                raise CheckpointError(
                    f"the checkpoint's data {name} is {state.get(name)!r}, but now it is {current!r}: the order of "
                    f"tasks would change mid-epoch; resume with {name} = {state.get(name)!r}"
                )
        if not _is_same_mixture(state.get("mixture", ()), self._mixture):
            raise CheckpointError(
                "the checkpoint was made with other weights of data.train: the order of tasks would change mid-epoch; "
                "resume with the weights of the first run"
            )
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= len(self.tasks):
            raise CheckpointError(
                f"the saved data position (epoch {epoch!r}, position {position!r}) is invalid for "
                f"{len(self.tasks)} tasks; the checkpoint is damaged, resume from an older one"
            )
        self.epoch, self._position = epoch, position
        self._order = self._permutation(epoch)

    def _permutation(self, epoch: int) -> Indices:
        if self._mixture:
            return mixture_order(self._mixture, self._seed, epoch, shuffle=self._shuffle)
        if not self._shuffle:
            return np.arange(len(self.tasks), dtype=np.int64)
        return shuffled(len(self.tasks), self._seed, epoch)


def _is_same_mixture(saved: Sequence[Sequence[float]], current: Sequence[tuple[int, float]]) -> bool:
    """Weights may differ in their last digit: they were once computed from the number of tasks."""
    return len(saved) == len(current) and all(
        size == old[0] and math.isclose(weight, old[1]) for old, (size, weight) in zip(saved, current, strict=True)
    )
