"""A short name for a set of weights, the same wherever they are held: does the policy have the learner's?"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLED = 64
"""Numbers looked at in each tensor; an update moves nearly all of them."""


@torch.no_grad()
def fingerprint(model: Any, dtype: torch.dtype | None = None) -> str:
    """`dtype` is what the weights are rounded to first: the precision of whichever copy has less of it."""
    kind = dtype or next(model.parameters()).dtype
    names, values = [], []
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        names.append(name)
        values.append(flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].to(kind).float())
    told = hashlib.blake2b("\n".join(names).encode(), digest_size=12)
    told.update(torch.cat(values).cpu().numpy().tobytes())
    return f"{str(kind).removeprefix('torch.')}:{told.hexdigest()}"


def matches(model: Any, reported: str) -> bool:
    """Whether `reported` names the weights of `model`, in the precision that it was taken in."""
    dtype = getattr(torch, reported.partition(":")[0], None)
    return isinstance(dtype, torch.dtype) and fingerprint(model, dtype) == reported
