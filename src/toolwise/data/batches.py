"""Endless seeded batches of tasks for the training loop, resumable at the exact position."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from toolwise.errors import CheckpointError, ConfigError
from toolwise.types import Task


class Batches(Iterator[list[Task]]):
    """Each epoch is a new permutation that depends only on (seed, epoch), so the state is two numbers.

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
            (not tasks, "no tasks; give a file with at least one row"),
            (batch_size < 1, f"batch_size is {batch_size}; it must be at least 1"),
            (drop_last and batch_size > len(tasks), too_large),
            (seed < 0, f"seed is {seed}; it must be 0 or more"),
        ):
            if is_wrong:
                raise ConfigError(problem)
        self.tasks = list(tasks)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._seed, self._shuffle = seed, shuffle
        task_ids = json.dumps([task.task_id for task in tasks])
        self._fingerprint = hashlib.sha256(task_ids.encode()).hexdigest()
        self.epoch = self._position = 0
        self._order = self._permutation(0)

    @property
    def batches_per_epoch(self) -> int:
        return (math.floor if self._drop_last else math.ceil)(len(self.tasks) / self._batch_size)

    def __next__(self) -> list[Task]:
        if len(self.tasks) - self._position < (self._batch_size if self._drop_last else 1):
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._permutation(self.epoch)
        indices = self._order[self._position : self._position + self._batch_size]
        self._position += len(indices)
        return [self.tasks[i] for i in indices]

    def state_dict(self) -> dict[str, Any]:
        """`position` counts tasks, not batches, so that a run can resume with a different batch size."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
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
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= len(self.tasks):
            raise CheckpointError(
                f"the saved data position (epoch {epoch!r}, position {position!r}) is invalid for "
                f"{len(self.tasks)} tasks; the checkpoint is damaged, resume from an older one"
            )
        self.epoch, self._position = epoch, position
        self._order = self._permutation(epoch)

    def _permutation(self, epoch: int) -> list[int]:
        import numpy as np

        if not self._shuffle:
            return list(range(len(self.tasks)))
        generator = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(epoch,)))
        return list(map(int, generator.permutation(len(self.tasks))))
