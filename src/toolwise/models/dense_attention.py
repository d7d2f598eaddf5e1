"""The formula of a layer's attention, and its computation in explicit steps where torch's fused attention cannot do it:
soft caps and attention sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shapes and the formula of one layer's attention."""

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None = None
    """Keys that a query sees, including its own; None if it sees all before it."""
    softcap: float | None = None
    sinks: bool = False

    @property
    def plain(self) -> bool:
        """Whether this is softmax(q kᵀ · scale) v over all keys before the query."""
        return self.window is None and self.softcap is None and not self.sinks


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(cap · tanh(q kᵀ · scale / cap) + mask) v: queries [..., heads, n, size], keys [..., key heads, m, size].

    `mask` is added, -inf where a query does not see a key. `sinks` [heads] are logits of one more key without a value.
    The softmax is computed in fp32 at least.
    """
    heads, key_heads = query.shape[-3], key.shape[-3]
    if heads != key_heads:
        key, value = (states.repeat_interleave(heads // key_heads, -3) for states in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    if dropout:
        weights = torch.dropout(weights, dropout, train=True)
    return weights.to(value.dtype) @ value
