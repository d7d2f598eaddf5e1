"""Inputs of a decode step whose attention kernel also applies rope and writes the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NewTokens:
    """One token per request: keys and values [B, KVH, D] before rope (like the queries), cos and sin [B, R] for the
    first R elements of each head, and the cache slot, −1 to write nothing. The weights are those of a norm of each
    head (Qwen3); with `plus_one`, its factor is 1 + weight (Gemma 3)."""

    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 0.0
    plus_one: bool = False
