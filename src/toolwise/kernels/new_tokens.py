"""Inputs of a decode step whose attention kernel also applies rope and writes the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NewTokens:
    """One token per request: keys and values [B, KVH, D] before rope (like the queries), cos and sin [B, D], and the
    cache slot, −1 to write nothing. The weights are those of Qwen3's per-head norm."""

    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 0.0
