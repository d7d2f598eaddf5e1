"""Reductions over data-parallel processes; no-ops in a single process.

Each process holds the same weights and its own rollouts. Losses are divided by counts over all processes, so gradients
are summed, not averaged, and equal those of a single process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(values: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
    """Sum each value over all processes. A collective: all processes must call it at the same point."""
    return _all_reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
    return _all_reduce(values, device, dist.ReduceOp.MAX)


def sum_gradients(weights: Iterable[Tensor]) -> None:
    """All-reduce the gradients. A missing gradient (this process had no rows) counts as zero."""
    if not is_distributed():
        return
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if not isinstance(weight.grad, DTensor):  # which is summed in the backward pass
            dist.all_reduce(weight.grad)


def clip_gradients(weights: Iterable[Tensor], max_norm: float) -> float:
    """Scale the gradients down to `max_norm`, over all processes if they are sharded; return their norm before."""
    weights = list(weights)
    sharded = [weight.grad.to_local() for weight in weights if isinstance(weight.grad, DTensor)]
    if not sharded:
        return float(torch.nn.utils.clip_grad_norm_(weights, max_norm))
    whole = [weight.grad for weight in weights if weight.grad is not None and not isinstance(weight.grad, DTensor)]
    [squared] = sum_over_ranks([float(_squared_norm(sharded))], sharded[0].device)
    norm = math.sqrt(squared + float(_squared_norm(whole)))
    if norm > max_norm:
        torch._foreach_mul_([*sharded, *whole], max_norm / (norm + 1e-6))
    return norm


def _squared_norm(tensors: Sequence[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def _all_reduce(values: Sequence[float], device: torch.device | str, op: dist.ReduceOp.RedOpType) -> list[float]:
    if not is_distributed():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    result: list[float] = tensor.tolist()
    return result
