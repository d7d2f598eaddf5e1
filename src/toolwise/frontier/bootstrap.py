"""Bootstrap over rows. All curves of one frontier are resampled with the same weights: differences are paired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval."""

    value: float
    low: float
    high: float


def row_weights(rows: int, replicates: int, seed: int) -> Floats:
    """[1 + replicates, rows], each line summing to 1. The first is the sample itself, every row once."""
    import numpy as np

    drawn = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=replicates)
    return np.concatenate([np.ones((1, rows)), drawn]) / rows


def estimate(samples: Floats, level: float = 0.95) -> Estimate:
    """From a statistic of the sample itself, first, and of its replicates."""
    import numpy as np

    tail = 100 * (1 - level) / 2
    resampled = samples[1:] if len(samples) > 1 else samples
    known = resampled[np.isfinite(resampled)]
    low, high = np.percentile(known, [tail, 100 - tail]) if len(known) else (np.nan, np.nan)
    return Estimate(float(samples[0]), float(low), float(high))
