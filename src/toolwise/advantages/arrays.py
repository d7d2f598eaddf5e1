"""Building blocks of the estimators over flat arrays: integer codes for keys, group statistics, discounted sums.

Nothing here loops over samples, and all statistics are float64. Rollouts of different lengths are concatenated in one
flat array with their `lengths` alongside, so there is no padding to mask.

`TokenMask` converts between [batch, length] arrays (NumPy or torch) and flat ones, which hold the entries under the
mask, row by row. Entries off the mask (tool tokens, padding) are never read, so they cannot affect the result even if
they are NaN. Results have the type of the input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from toolwise.errors import ToolwiseError

Doubles = NDArray[np.float64]
Ints = NDArray[np.intp]
Normalization = Literal["mean_std_norm", "mean_norm", "leave_one_out"]
Array = TypeVar("Array")

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


def check_finite(values: Doubles, what: str = "score") -> None:
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise CreditError(f"{what} {first} is not a finite number; leave it out")


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


def normalize(
    x: Doubles,
    groups: Ints,
    mode: Normalization = "mean_std_norm",
    *,
    epsilon: float = EPSILON,
    scale_of: Doubles | None = None,
) -> Doubles:
    """Normalizes each value within its group; `groups` are codes from 0.

    mean_std_norm: (x − mean) / (std + ε) with the sample std. mean_norm: x − mean. leave_one_out: x − mean of the
    others. A group of one, or of equal values, gives exactly 0. `scale_of`: the values whose spread decides the scale,
    if `x` is a part of them; the parts of a sum then add up to the normalized sum.
    """
    if len(x) == 0:
        return np.zeros(0)
    centred = center(x, groups)
    if scale_of is None:
        scale = group_scale(x, groups, mode, epsilon=epsilon, centred=centred)
    else:
        scale = group_scale(scale_of, groups, mode, epsilon=epsilon)
    return np.asarray(centred * scale[groups])


def center(x: Doubles, groups: Ints) -> Doubles:
    """Each value minus the mean of its group."""
    return np.asarray(x - (np.bincount(groups, x) / np.maximum(np.bincount(groups), 1))[groups])


def group_scale(
    x: Doubles,
    groups: Ints,
    mode: Normalization = "mean_std_norm",
    *,
    epsilon: float = EPSILON,
    centred: Doubles | None = None,
) -> Doubles:
    """What `normalize` multiplies the centred values of each group by; 0 if they are equal. `centred`: the centred
    values, if they are known."""
    count = np.bincount(groups)
    others = np.maximum(count - 1, 1)
    # Rounding leaves 7 × 0.1 slightly off its own mean; equal values must give exactly 0.
    sample = np.zeros(len(count))
    sample[groups] = x
    scale = (np.bincount(groups, x != sample[groups], len(count)) > 0).astype(np.float64)
    if mode == "leave_one_out":
        scale *= count / others
    elif mode == "mean_std_norm":
        centred = center(x, groups) if centred is None else centred
        scale /= np.sqrt(np.bincount(groups, centred * centred) / others) + epsilon
    return np.asarray(scale)


def whiten(x: Doubles) -> Doubles:
    """(x − mean) / √(variance + ε) over the whole array, sample variance; exactly 0 if all values are equal."""
    if len(x) == 0 or bool((x == x[0]).all()):
        return np.zeros(len(x))
    centred = x - x.mean()
    return np.asarray(centred / np.sqrt(centred @ centred / (len(x) - 1) + WHITEN_EPSILON))


def whitening_factor(x: Doubles) -> float:
    """What `whiten` multiplies x − mean by."""
    if len(x) == 0 or bool((x == x[0]).all()):
        return 0.0
    centred = x - x.mean()
    return float(1.0 / np.sqrt(centred @ centred / (len(x) - 1) + WHITEN_EPSILON))


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


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Which entries of a [batch, length] array count."""

    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, response_mask: Any, **others: Any) -> TokenMask:
        """Checks that all `others` have the mask's shape."""
        mask = as_numpy(response_mask)
        shapes = {name: tuple(value.shape) for name, value in others.items()}
        if mask.ndim != 2 or set(shapes.values()) - {mask.shape}:
            listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise CreditError(f"shapes differ: {listing}, mask {mask.shape}; all must be [batch, length]")
        return cls(mask.astype(bool))

    @property
    def lengths(self) -> Ints:
        return np.asarray(np.count_nonzero(self.mask, axis=1), dtype=np.intp)

    @property
    def nonempty_rows(self) -> NDArray[np.bool_]:
        # Nearly every reply begins with a sampled token, so the first column is usually enough.
        first = self.mask[:, :1]
        return np.asarray(first[:, 0] if first.size and first.all() else self.mask.any(1))

    def gather(self, values: Any) -> Doubles:
        return as_numpy(values)[self.mask].astype(np.float64)

    def row_sums(self, values: Any) -> Doubles:
        array = as_numpy(values)
        # Rewards are 0 at nearly every token: finding the others is cheaper than summing all.
        indices = np.flatnonzero((array != 0) & self.mask)
        weights = array.reshape(-1)[indices]
        return np.bincount(indices // max(1, array.shape[1]), weights, len(array)).astype(np.float64, copy=False)

    def scatter(self, flat: Doubles, like: Array) -> Array:
        """Inverse of `gather`: 0 off the mask, in the type of `like`."""
        out = np.zeros(self.mask.shape, dtype=_precision(like))
        out[self.mask] = flat
        return cast_like(out, like)

    def spread(self, rows: Doubles, like: Array) -> Array:
        """One value per row at all its masked positions, 0 elsewhere, in the type of `like`."""
        return cast_like(self.mask * rows.astype(_precision(like))[:, None], like)


def as_numpy(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):
        # NumPy has no bfloat16; float32 represents all its values.
        tensor = values.detach().cpu()
        return np.asarray(tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor)
    return np.asarray(values)


def cast_like(out: NDArray[Any], like: Array) -> Array:
    """`out` in the library, dtype and device of `like`; float32 if `like` is not floating point."""
    target: Any = like
    if hasattr(target, "detach"):
        import torch

        tensor = torch.from_numpy(out).to(target.device, target.dtype if target.is_floating_point() else torch.float32)
        return cast("Array", tensor)
    dtype = target.dtype if np.issubdtype(target.dtype, np.floating) else np.float32
    return cast("Array", out.astype(dtype, copy=False))


def copy_array(array: Any) -> Any:
    """A copy that shares no memory."""
    return array.clone() if hasattr(array, "clone") else array.copy()


def _precision(like: Any) -> type[np.floating[Any]]:
    """The dtype to compute in; more precision than the output keeps would only cost time."""
    return np.float64 if str(like.dtype).endswith("float64") else np.float32
