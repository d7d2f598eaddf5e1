"""A short name for a set of weights, the same wherever they are held: does the policy have the learner's?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

VALUES_PER_TENSOR = 64
"""Numbers looked at in each tensor; an update moves nearly all of them."""


@torch.no_grad()
def fingerprint(model: Any, dtype: torch.dtype | None = None) -> str:
    """`dtype` is what the weights are rounded to first: the precision of whichever copy has less of it."""
    kind = dtype or next(model.parameters()).dtype
    names, values = [], []
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        names.append(name)
        values.append(flat[:: max(1, len(flat) // VALUES_PER_TENSOR)][:VALUES_PER_TENSOR].to(kind).float())
    told = hashlib.blake2b("\n".join(names).encode(), digest_size=12)
    told.update(torch.cat(values).cpu().numpy().tobytes())
    return f"{str(kind).removeprefix('torch.')}:{told.hexdigest()}"


def matches(model: Any, reported: str) -> bool:
    """Whether `reported` names the weights of `model`, in the precision that it was taken in."""
    dtype = getattr(torch, reported.partition(":")[0], None)
    return isinstance(dtype, torch.dtype) and fingerprint(model, dtype) == reported


_INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(weights: Iterable[Tensor]) -> str:
    """Of every bit of the weights that may change: another one once any of them has. Sums are taken on their device."""
    told = hashlib.blake2b(digest_size=12)
    for weight in weights:
        if weight.requires_grad:
            bits = weight.detach().contiguous().view(_INT_DTYPES[weight.element_size()])
            columns = bits.sum(0, dtype=torch.int64) if bits.ndim > 1 else bits
            told.update(columns.cpu().numpy().tobytes())
    return told.hexdigest()
