"""Converts between [batch, length] arrays (NumPy or torch) and the flat arrays of the estimators.

Estimators see only the entries under the mask, concatenated row by row. Entries off the mask (tool tokens, padding) are
never read, so they cannot affect the result even if they are NaN. Results have the type of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from toolwise.advantages.arrays import CreditError, Doubles, Ints

Array = TypeVar("Array")


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
        """The masked entries as a flat array."""
        return as_numpy(values)[self.mask].astype(np.float64)

    def row_sums(self, values: Any) -> Doubles:
        """The sum of each row's masked entries."""
        array = as_numpy(values)
        # Rewards are 0 at nearly every token: finding the others is cheaper than summing all.
        indices = np.flatnonzero((array != 0) & self.mask)
        rows = indices // max(1, array.shape[1])
        return np.bincount(rows, array.reshape(-1)[indices], len(array)).astype(np.float64, copy=False)

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
    result: Any
    if hasattr(target, "detach"):
        import torch

        dtype = target.dtype if target.is_floating_point() else torch.float32
        result = torch.from_numpy(out).to(dtype=dtype, device=target.device)
    else:
        result = out.astype(target.dtype if np.issubdtype(target.dtype, np.floating) else np.float32, copy=False)
    return result  # type: ignore[no-any-return]


def copy_array(array: Array) -> Array:
    """A copy that shares no memory."""
    source: Any = array
    result: Any = source.clone() if hasattr(source, "clone") else source.copy()
    return result  # type: ignore[no-any-return]


def _precision(like: Any) -> type[np.floating[Any]]:
    """The dtype to compute in; more precision than the output keeps would only cost time."""
    return np.float64 if str(like.dtype).endswith("float64") else np.float32
