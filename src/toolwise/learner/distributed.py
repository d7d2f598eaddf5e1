"""Reductions over data-parallel processes; no-ops in a single process.

Each process holds the same weights and its own rollouts. Losses are divided by counts over all processes, so gradients
are summed, not averaged, and equal those of a single process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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
        dist.all_reduce(weight.grad)


def _all_reduce(values: Sequence[float], device: torch.device | str, op: dist.ReduceOp.RedOpType) -> list[float]:
    if not is_distributed():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    result: list[float] = tensor.tolist()
    return result
