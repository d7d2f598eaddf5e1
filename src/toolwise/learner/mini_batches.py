"""Splits a batch's rows into optimiser steps. The rows of a rollout always stay together; so do groups, if there are
enough of them, because their shared prompt is then computed once."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from toolwise.learner import distributed
from toolwise.learner.batch import Batch


def mini_batches(batch: Batch, *, count: int, epochs: int, seed: str) -> Iterator[list[int]]:
    """Yield the rows of `count` steps per epoch (fewer if there are fewer rollouts), reshuffled each epoch.

    All processes take the same number of steps: a process with too few rollouts yields some empty ones.
    """
    rng = Random(seed)
    groups: dict[str, list[int]] = {}
    rollouts: dict[int, list[int]] = {}
    for row in batch.trainable_rows():
        rollout = batch.rollout_of_row[row]
        groups.setdefault(batch.group_of_rollout[rollout], []).append(row)
        rollouts.setdefault(rollout, []).append(row)
    [max_rollouts] = distributed.max_over_ranks([float(len(rollouts))], batch.device)
    count = min(count, int(max_rollouts))
    units = list(groups.values()) if len(groups) >= count else list(rollouts.values())
    for _ in range(epochs):
        order = list(units)
        if count > 1:
            rng.shuffle(order)
        for part in range(count):
            yield [row for unit in order[part::count] for row in unit]
