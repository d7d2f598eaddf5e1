"""What a decode step brings along, where rope and the cache write are part of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NewTokens:
    """One a request: keys and values [B, KVH, D] not rotated yet, as the queries are not; angles [B, D]; and the slot
    of each, −1 where nothing is to be written. The weights are those of Qwen3's norm of each head."""

    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 0.0
