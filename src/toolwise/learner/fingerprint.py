"""Short hashes of model weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

VALUES_PER_TENSOR = 64
"""Values hashed per tensor; an update changes nearly all of them."""


def fingerprint(model: Any) -> str:
    """Hash a sample of the weights."""
    return fingerprint_of(dict(model.named_parameters()))


@torch.no_grad()
def fingerprint_of(weights: Mapping[str, Tensor]) -> str:
    """The fingerprint of a model with these parameters, in its order."""
    names, values = [], []
    model_dtype = next(iter(weights.values())).dtype
    for name, weight in sorted(weights.items()):
        names.append(name)
        values.append(sample_of(weight).to(model_dtype).float())
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=12)
    digest.update(torch.cat(values).cpu().numpy().tobytes())
    return f"{str(model_dtype).removeprefix('torch.')}:{digest.hexdigest()}"


def sample_of(weight: Tensor) -> Tensor:
    """The values of a tensor that are hashed; of these values, the same again."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, len(flat) // VALUES_PER_TENSOR)][:VALUES_PER_TENSOR]


_INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(weights: Iterable[Tensor]) -> str:
    """Hash every bit of the trainable weights. Columns are summed on the device first, so little is copied."""
    digest = hashlib.blake2b(digest_size=12)
    for weight in weights:
        if weight.requires_grad:
            bits = weight.detach().contiguous().view(_INT_DTYPES[weight.element_size()])
            columns = bits.sum(0, dtype=torch.int64) if bits.ndim > 1 else bits
            digest.update(columns.cpu().numpy().tobytes())
    return digest.hexdigest()
