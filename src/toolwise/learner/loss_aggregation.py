"""Loss aggregation: the weight of each sampled token in its mini-batch.

    token      1 / tokens                                   every token counts the same: long rollouts count more
    step       1 / (steps · tokens of its step)             every decision counts the same
    rollout    1 / (rollouts · tokens of its rollout)       every rollout counts the same: GRPO as published
    constant   1 / (rollouts · length)                      Dr. GRPO (arXiv 2503.20783): no weight depends on a length

Weights are fixed before a mini-batch is split into micro-batches or across processes, and the weighted losses are
summed, so the split cannot change the loss or its gradient. Steps and rollouts without sampled tokens are not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolwise.config.schema import Aggregation
from toolwise.errors import ConfigError
from toolwise.learner import distributed


def token_weights(aggregation: Aggregation, steps: Tensor, rollouts: Tensor, *, length: int | None = None) -> Tensor:
    """One weight per token of a mini-batch, given the indices of its step and its rollout."""
    if aggregation == "constant" and not length:
        raise ConfigError('actor.loss_aggregation = "constant" needs actor.loss_length, the token count to divide by')
    step_sizes, rollout_sizes = _members(steps), _members(rollouts)
    counts = (len(steps), _distinct(step_sizes), _distinct(rollout_sizes))
    tokens, step_count, rollout_count = distributed.sum_over_ranks([float(count) for count in counts], steps.device)
    if aggregation == "token":
        return torch.full((len(steps),), 1.0 / max(tokens, 1.0), device=steps.device)
    if aggregation == "step":
        return step_sizes.mul(max(step_count, 1.0)).reciprocal()
    if aggregation == "rollout":
        return rollout_sizes.mul(max(rollout_count, 1.0)).reciprocal()
    return torch.full((len(steps),), 1.0 / (max(rollout_count, 1.0) * float(length or 1)), device=steps.device)


def _members(codes: Tensor) -> Tensor:
    """For each token, the number of tokens with the same code."""
    _, inverse, counts = torch.unique(codes, return_inverse=True, return_counts=True)
    members: Tensor = counts[inverse].float()
    return members


def _distinct(members: Tensor) -> int:
    return round(float((1.0 / members.double()).sum()))
