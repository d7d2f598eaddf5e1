"""Arrays [batch, length] in and out, from numpy or torch: what was given is what comes back.

All estimators over such arrays see the same thing: the entries under the mask, row by row, end to end. What lies off
the mask (a tool's tokens, padding) is never read, so that it changes nothing, not even where it is no number.
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
            told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise CreditError(f"shapes differ: {told}, mask {mask.shape}; all must be [batch, length]")
        return cls(mask.astype(bool))

    @property
    def lengths(self) -> Ints:
        return np.asarray(np.count_nonzero(self.mask, axis=1), dtype=np.intp)

    @property
    def nonempty_rows(self) -> NDArray[np.bool_]:
        # Nearly every reply begins with a sampled token: then one column says it all.
        first = self.mask[:, :1]
        return np.asarray(first[:, 0] if first.size and first.all() else self.mask.any(1))

    def gather(self, values: Any) -> Doubles:
        """The entries that count, flat."""
        return as_numpy(values)[self.mask].astype(np.float64)

    def row_sums(self, values: Any) -> Doubles:
        """The sum of each row's entries that count."""
        found = as_numpy(values)
        # Rewards are 0 at nearly every token: to look for the others takes less than to add all up.
        places = np.flatnonzero((found != 0) & self.mask)
        rows = places // max(1, found.shape[1])
        return np.bincount(rows, found.reshape(-1)[places], len(found)).astype(np.float64, copy=False)

    def scatter(self, flat: Doubles, like: Array) -> Array:
        """`flat` back in its places, 0 elsewhere, as an array of `like`'s kind."""
        out = np.zeros(self.mask.shape, dtype=_precision(like))
        out[self.mask] = flat
        return cast_like(out, like)

    def spread(self, rows: Doubles, like: Array) -> Array:
        """One number a row in all its places, 0 elsewhere, as an array of `like`'s kind."""
        return cast_like(self.mask * rows.astype(_precision(like))[:, None], like)


def as_numpy(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):
        # numpy has no bfloat16, and single precision holds every one of its values.
        plain = values.detach().cpu()
        return np.asarray(plain.float() if plain.is_floating_point() and plain.element_size() < 4 else plain)
    return np.asarray(values)


def cast_like(out: NDArray[Any], like: Array) -> Array:
    """`out` as numpy or torch, in `like`'s precision and on its device; whole numbers become single precision."""
    given: Any = like
    made: Any
    if hasattr(given, "detach"):
        import torch

        kind = given.dtype if given.is_floating_point() else torch.float32
        made = torch.from_numpy(out).to(dtype=kind, device=given.device)
    else:
        made = out.astype(given.dtype if np.issubdtype(given.dtype, np.floating) else np.float32, copy=False)
    return made  # type: ignore[no-any-return]


def copy_array(array: Array) -> Array:
    """A copy that shares nothing."""
    given: Any = array
    made: Any = given.clone() if hasattr(given, "clone") else given.copy()
    return made  # type: ignore[no-any-return]


def _precision(like: Any) -> type[np.floating[Any]]:
    """What to fill arrays in: more than the reader keeps would only cost time."""
    return np.float64 if str(like.dtype).endswith("float64") else np.float32
