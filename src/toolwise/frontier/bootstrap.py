"""Bootstrap over rows. All curves of a frontier are resampled with the same weights, so differences are paired."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolwise.routing.threshold import Floats


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


def row_weights(rows: int, replicates: int, seed: int) -> Floats:
    """[1 + replicates, rows], each line sums to 1. The first is the original sample: every row once."""
    counts = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=replicates)
    return np.concatenate([np.ones((1, rows)), counts]) / rows


def estimate(samples: Floats, level: float = 0.95) -> Estimate:
    """`samples[0]` is the statistic of the original sample, the rest are its bootstrap replicates."""
    tail = 100 * (1 - level) / 2
    resampled = samples[1:] if len(samples) > 1 else samples
    finite = resampled[np.isfinite(resampled)]
    low, high = np.percentile(finite, [tail, 100 - tail]) if len(finite) else (np.nan, np.nan)
    return Estimate(float(samples[0]), float(low), float(high))
