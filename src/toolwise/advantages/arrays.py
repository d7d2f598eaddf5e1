"""What every estimator is made of, over flat arrays: numbers for keys, statistics within groups, discounted sums.

Nothing here loops over samples; all statistics are float64. Rollouts of unequal length lie end to end in one flat
array with their `lengths` beside it, so there is no padding to mask.
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
"""Advantages nearer to 0 are none."""


class CreditError(ToolwiseError, ValueError):
    """Scores, groups, steps or tokens that do not fit together."""


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    if value not in (choices := tuple(known)):
        raise CreditError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise CreditError(f"{name} is {value}; it must lie between 0 and 1")


def integer_codes(keys: Any) -> Ints:
    """A number for each key, the same for equal ones, from 0."""
    if isinstance(keys, np.ndarray) and keys.dtype.kind == "i":
        return compact_codes(keys.astype(np.intp, copy=False))[0]
    # Elements of a tensor are tensors, which hash by identity: each would be a group of its own.
    plain: Sequence[Hashable] = keys.tolist() if hasattr(keys, "tolist") else keys
    numbers: defaultdict[Hashable, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    return np.fromiter(map(numbers.__getitem__, plain), np.intp, len(plain))


def signs(values: Doubles) -> Doubles:
    """−1, 0 or 1. What rounding leaves of a mean's own deviation from it is 0."""
    return np.asarray(np.where(np.abs(values) < SIGN_TOLERANCE, 0.0, np.sign(values)))


def sign(value: float) -> float:
    return float(signs(np.asarray(value)))


def compact_codes(codes: Ints) -> tuple[Ints, int]:
    """The same partition with numbers from 0 up to a few times their count, so that tables of them are small; and how
    long such a table must be. Not each number need occur."""
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
    # Scattered numbers have to be sorted, which is the only thing here that is not linear.
    found, inverse = np.unique(codes, return_inverse=True)
    return inverse.astype(np.intp, copy=False), len(found)


def pair_codes(first: Ints, second: Ints) -> tuple[Ints, int]:
    """The pairs (firstᵢ, secondᵢ) as narrow numbers."""
    a, _ = compact_codes(first)
    b, width = compact_codes(second)
    return compact_codes(a * width + b)


def normalize(x: Doubles, groups: Ints, how: Normalization = "mean_std_norm", *, epsilon: float = EPSILON) -> Doubles:
    """Each value against its group, `groups` being numbers from 0.

    mean_std_norm (x − mean) / (std + ε) with the sample std · mean_norm x − mean · leave_one_out x − mean of the
    others. A group of one, and one whose values are all equal, gives exactly 0.
    """
    if len(x) == 0:
        return np.zeros(0)
    count = np.bincount(groups)
    centred = x - (np.bincount(groups, x) / np.maximum(count, 1))[groups]
    others = np.maximum(count - 1, 1)
    # Rounding leaves 7 × 0.1 a hair off its own mean; equal values must say nothing at all.
    scale = group_varies(x, groups, len(count)).astype(np.float64)
    if how == "leave_one_out":
        scale *= count / others
    elif how == "mean_std_norm":
        scale /= np.sqrt(np.bincount(groups, centred * centred) / others) + epsilon
    return np.asarray(centred * scale[groups])


def group_varies(x: Doubles, groups: Ints, count: int) -> NDArray[np.bool_]:
    """For each group, whether two of its values differ."""
    some = np.zeros(count)
    some[groups] = x
    return np.bincount(groups, x != some[groups], count) > 0


def whiten(x: Doubles) -> Doubles:
    """(x − mean) / √(variance + ε) over the whole array, sample variance; exactly 0 where all are equal."""
    if len(x) == 0 or bool((x == x[0]).all()):
        return np.zeros(len(x))
    centred = x - x.mean()
    return np.asarray(centred / np.sqrt(centred @ centred / (len(x) - 1) + WHITEN_EPSILON))


def discounted_sums(x: Doubles, lengths: Ints, factor: float) -> Doubles:
    """Sₜ = xₜ + factor · Sₜ₊₁ within each stretch of `lengths`, which lie end to end in `x`.

    By doubling: after pass k each sum reaches 2ᵏ ahead, so a stretch of n takes log₂ n passes over the whole array.
    What a sum is, to the last bit, depends on what lies ahead of it and on nothing else.
    """
    sums = np.array(x, dtype=np.float64)
    if len(sums) == 0:
        return sums
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(sums))
    shift, weight, longest = 1, factor, int(lengths.max())
    while shift < longest and weight != 0.0:
        ahead = np.where(left[:-shift] > shift, sums[shift:], 0.0)
        ahead *= weight
        sums[:-shift] += ahead
        shift, weight = 2 * shift, weight * weight
    return sums
