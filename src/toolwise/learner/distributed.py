"""Several processes that learn together: sums over all of them, and nothing at all where there is one.

Each process holds the same weights and its own rollouts. Losses are divided by counts over all processes, so that
gradients are summed, not averaged, and come out as one process would have computed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(values: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
    """Each value, summed over all processes. All of them must ask at the same point."""
    return _all_reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
    return _all_reduce(values, device, dist.ReduceOp.MAX)


def sum_gradients(weights: Iterable[Tensor]) -> None:
    """A weight that this process has no gradient for (it had no rows) counts as zero."""
    if not is_distributed():
        return
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        dist.all_reduce(weight.grad)


def _all_reduce(values: Sequence[float], device: torch.device | str, how: dist.ReduceOp.RedOpType) -> list[float]:
    if not is_distributed():
        return list(values)
    held = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(held, op=how)
    found: list[float] = held.tolist()
    return found
