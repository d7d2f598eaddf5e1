"""Which rows make up each optimiser step. Groups stay together where there are enough of them, since their rollouts
share a prompt that is then computed once; a rollout always does."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from toolwise.learner import distributed
from toolwise.learner.batch import Batch


def mini_batches(batch: Batch, *, count: int, epochs: int, seed: str) -> Iterator[list[int]]:
    """Rows of `count` steps an epoch (fewer where there are fewer rollouts), each epoch in an order of its own.

    Processes that learn together take equally many steps: where one has too few rollouts, some of its steps are empty.
    """
    rng = Random(seed)
    groups: dict[str, list[int]] = {}
    rollouts: dict[int, list[int]] = {}
    for row in batch.trainable_rows():
        rollout = batch.rollout_of_row[row]
        groups.setdefault(batch.group_of_rollout[rollout], []).append(row)
        rollouts.setdefault(rollout, []).append(row)
    [most] = distributed.max_over_ranks([float(len(rollouts))], batch.device)
    count = min(count, int(most))
    units = list(groups.values()) if len(groups) >= count else list(rollouts.values())
    for _ in range(epochs):
        order = list(units)
        if count > 1:
            rng.shuffle(order)
        for part in range(count):
            yield [row for unit in order[part::count] for row in unit]
