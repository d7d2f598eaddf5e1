"""The kernels of a decode step (`decode_linear`, `decode_step`) in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from toolwise.kernels import torch_reference


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
) -> torch.Tensor:
    if squares is None:
        out = F.linear(x, weight, bias)
    else:
        wide = F.linear(x, weight).to(squares.dtype) * torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + eps)
        out = (wide if bias is None else wide + bias).to(x.dtype)
    if gate is None:
        return out
    return torch_reference.silu_mul(out) if gate == "silu" else torch_reference.gelu_tanh_mul(out)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor | None = None,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = residual + F.linear(x, weight, bias)
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    gained = total if gain is None else (wide * (gain.to(wide.dtype) + plus_one)).to(total.dtype)
    return total, gained, wide.square().sum(1, keepdim=True)


def begin_step(
    positions: torch.Tensor, prefix: torch.Tensor, active: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    offset, alive = positions - prefix, active > 0
    block = tables.gather(1, (offset // block_size)[:, None]).squeeze(1).long()
    slots = torch.where(alive, block * block_size + positions % block_size, -1)
    return slots, torch.where(alive, offset + 1, 0).int()


def end_step(
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    stops: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    limits: torch.Tensor,
    active: torch.Tensor,
    step: torch.Tensor,
    all_tokens: torch.Tensor,
    all_logprobs: torch.Tensor,
) -> None:
    alive, rows = active > 0, len(tokens)
    all_tokens[:, :rows].index_copy_(0, step, torch.where(alive, tokens, -1)[None])
    all_logprobs[:, :rows].index_copy_(0, step, logprobs[None])
    sampled += alive
    positions += alive
    ids.copy_(torch.where(alive, tokens, ids))
    unfinished = (tokens[:, None] != stops).all(1) & (sampled < limits)
    active.copy_(alive & unfinished)
    step += 1
