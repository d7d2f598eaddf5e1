"""The order of tasks in an epoch: a permutation, or a mixture of sources in the shares of their weights.

In a mixture, each source is a stream: one permutation of its tasks after another. An epoch takes the next part of it,
so that no task comes twice before all tasks of its source came once. An epoch depends only on its number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toolwise.errors import ConfigError

Order = npt.NDArray[np.int64]


def shuffled(count: int, seed: int, *key: int) -> Order:
    """A permutation of the first `count` numbers, by a seed and a key."""
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
    return generator.permutation(count)


def mixture_order(sources: Sequence[tuple[int, float]], seed: int, epoch: int, *, shuffle: bool) -> Order:
    """The indices of an epoch's tasks. `sources` are (tasks, weight); their tasks follow each other in this order."""
    if any(size == 0 for size, _ in sources):
        raise ConfigError("data.train: a source with a weight has no task to train on; leave it out")
    counts = _shares([weight for _, weight in sources], sum(size for size, _ in sources))
    drawn, first = [], 0
    for index, ((size, _), count) in enumerate(zip(sources, counts, strict=True)):
        drawn.append(first + _stream(size, epoch * count, count, seed, index, shuffle=shuffle))
        first += size
    merged = np.concatenate(drawn)
    if shuffle:
        return merged[shuffled(len(merged), seed, epoch)]
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return merged[np.argsort(places, kind="stable")]  # spread each source evenly over the epoch


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` in proportion to the weights, rounded by largest remainders; at least one each."""
    exact = np.array(weights, dtype=np.float64) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    if (counts == 0).any():
        smallest = min(weights)
        raise ConfigError(
            f"data.train: a source of weight {smallest:g} would have no task in an epoch of {total}; raise its weight, "
            "or leave it out"
        )
    return [int(count) for count in counts]


def _stream(size: int, start: int, count: int, seed: int, source: int, *, shuffle: bool) -> Order:
    """`count` tasks of a source from position `start` of its stream."""
    parts = []
    for cycle in range(start // size, (start + count - 1) // size + 1):
        # a key of three numbers: those of epochs have one
        order = shuffled(size, seed, source, cycle, 0) if shuffle else np.arange(size, dtype=np.int64)
        parts.append(order[max(0, start - cycle * size) : start + count - cycle * size])
    return np.concatenate(parts)
