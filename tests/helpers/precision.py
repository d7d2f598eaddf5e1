"""How far a number computed in single precision may lie from the exact one, and at which size that holds."""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDING = 2.0**-23
"""The rounding error of fp32 relative to the number that is rounded."""


def fp32_bound(exact: Any, roundings: int = 32, *, scale: float = 1.0) -> Any:
    """`roundings` rounding errors of numbers of this size, or of size `scale` where they are smaller.

    The errors grow with the numbers and depend on the order of summation, which differs between instruction sets: for
    the shipped model's log-probs they were up to 13 roundings (AVX-512, AVX2 and without vector instructions).
    """
    return roundings * ROUNDING * np.maximum(scale, np.abs(np.asarray(exact, dtype=np.float64)))


def assert_fp32_close(found: Any, exact: Any, roundings: int = 32, *, scale: float = 1.0) -> None:
    """`found` in fp32 equals `exact`, computed in float64. `scale`: size of the numbers they were summed from."""
    found, exact = np.asarray(found, dtype=np.float64), np.asarray(exact, dtype=np.float64)
    assert found.shape == exact.shape
    errors = np.abs(found - exact) / fp32_bound(exact, 1, scale=scale)
    assert errors.max(initial=0.0) <= roundings, f"{errors.max():.1f} roundings of fp32 from float64"
