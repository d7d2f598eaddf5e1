"""Building blocks of the estimators over flat arrays: integer codes for keys, group statistics, discounted sums.

Nothing here loops over samples, and all statistics are float64. Rollouts of different lengths are concatenated in one
flat array with their `lengths` alongside, so there is no padding to mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toolwise.errors import ToolwiseError

Doubles = NDArray[np.float64]
Ints = NDArray[np.intp]
Normalization = Literal["mean_std_norm", "mean_norm", "leave_one_out"]

EPSILON = 1e-6
WHITEN_EPSILON = 1e-8
SIGN_TOLERANCE = 1e-9
"""Advantages closer to 0 count as 0."""


class CreditError(ToolwiseError, ValueError):
    """Inconsistent or invalid scores, groups, steps, tokens or settings."""


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    if value not in (choices := tuple(known)):
        raise CreditError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise CreditError(f"{name} is {value}; it must lie between 0 and 1")


def integer_codes(keys: Any) -> Ints:
    """Non-negative integer codes, equal for equal keys."""
    if isinstance(keys, np.ndarray) and keys.dtype.kind == "i":
        return compact_codes(keys.astype(np.intp, copy=False))[0]
    # Elements of a tensor are tensors, which hash by identity: each would form its own group.
    values: Sequence[Hashable] = keys.tolist() if hasattr(keys, "tolist") else keys
    codes: defaultdict[Hashable, int] = defaultdict()
    codes.default_factory = codes.__len__
    return np.fromiter(map(codes.__getitem__, values), np.intp, len(values))


def signs(values: Doubles) -> Doubles:
    """−1, 0 or 1; values within rounding error of 0 are 0."""
    return np.asarray(np.where(np.abs(values) < SIGN_TOLERANCE, 0.0, np.sign(values)))


def sign(value: float) -> float:
    return float(signs(np.asarray(value)))


def compact_codes(codes: Ints) -> tuple[Ints, int]:
    """The same partition with small codes from 0, and the table size that they need.

    The size is at most a few times the number of codes; not every code needs to occur.
    """
    if len(codes) == 0:
        return codes, 0
    low = int(codes.min())
    span = int(codes.max()) - low + 1
    if span <= 4 * len(codes):
        return (codes - low if low else codes), span
    if span <= 64 * len(codes):
        occurs = np.zeros(span, dtype=bool)
        occurs[codes - low] = True
        rank = np.cumsum(occurs)
        return rank[codes - low] - 1, int(rank[-1])
    # Widely scattered codes have to be sorted; this is the only non-linear step.
    unique, inverse = np.unique(codes, return_inverse=True)
    return inverse.astype(np.intp, copy=False), len(unique)


def pair_codes(first: Ints, second: Ints) -> tuple[Ints, int]:
    """Compact codes of the pairs (firstᵢ, secondᵢ), and the table size."""
    a, _ = compact_codes(first)
    b, width = compact_codes(second)
    return compact_codes(a * width + b)


def normalize(x: Doubles, groups: Ints, mode: Normalization = "mean_std_norm", *, epsilon: float = EPSILON) -> Doubles:
    """Normalizes each value within its group; `groups` are codes from 0.

    mean_std_norm: (x − mean) / (std + ε) with the sample std. mean_norm: x − mean. leave_one_out: x − mean of the
    others. A group of one, or of equal values, gives exactly 0.
    """
    if len(x) == 0:
        return np.zeros(0)
    count = np.bincount(groups)
    centred = x - (np.bincount(groups, x) / np.maximum(count, 1))[groups]
    others = np.maximum(count - 1, 1)
    # Rounding leaves 7 × 0.1 slightly off its own mean; equal values must give exactly 0.
    scale = group_varies(x, groups, len(count)).astype(np.float64)
    if mode == "leave_one_out":
        scale *= count / others
    elif mode == "mean_std_norm":
        scale /= np.sqrt(np.bincount(groups, centred * centred) / others) + epsilon
    return np.asarray(centred * scale[groups])


def group_varies(x: Doubles, groups: Ints, count: int) -> NDArray[np.bool_]:
    """Whether the values of each group differ."""
    sample = np.zeros(count)
    sample[groups] = x
    return np.bincount(groups, x != sample[groups], count) > 0


def whiten(x: Doubles) -> Doubles:
    """(x − mean) / √(variance + ε) over the whole array, sample variance; exactly 0 if all values are equal."""
    if len(x) == 0 or bool((x == x[0]).all()):
        return np.zeros(len(x))
    centred = x - x.mean()
    return np.asarray(centred / np.sqrt(centred @ centred / (len(x) - 1) + WHITEN_EPSILON))


def discounted_sums(x: Doubles, lengths: Ints, factor: float) -> Doubles:
    """Sₜ = xₜ + factor · Sₜ₊₁ within each segment of `lengths`; the segments are concatenated in `x`.

    By doubling: after pass k each sum covers 2ᵏ entries, so a segment of n takes log₂ n passes over the whole array.
    Each sum depends only on the entries after it, down to the last bit.
    """
    sums = np.array(x, dtype=np.float64)
    if len(sums) == 0:
        return sums
    remaining = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(sums))
    shift, weight, longest = 1, factor, int(lengths.max())
    while shift < longest and weight != 0.0:
        ahead = np.where(remaining[:-shift] > shift, sums[shift:], 0.0)
        ahead *= weight
        sums[:-shift] += ahead
        shift, weight = 2 * shift, weight * weight
    return sums
