"""From per-token losses to one number: what each sampled token weighs in its mini-batch.

    token      1 / tokens                                   every token weighs the same: long rollouts weigh more
    step       1 / (steps · tokens of its step)             every decision weighs the same
    rollout    1 / (rollouts · tokens of its rollout)       every rollout weighs the same: GRPO as published
    constant   1 / (rollouts · length)                      Dr. GRPO (arXiv 2503.20783): no weight depends on a length

Weights are fixed before a mini-batch is cut into micro-batches or shared among processes, and the weighted losses are
summed: neither the cut nor the sharing can change the loss or its gradient. What has no sampled token counts nowhere.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from toolwise.errors import ConfigError
from toolwise.learner import distributed

Aggregation = Literal["token", "step", "rollout", "constant"]


def token_weights(how: Aggregation, steps: Tensor, rollouts: Tensor, *, length: int | None = None) -> Tensor:
    """One weight for each token of a mini-batch, given the number of its step and of its rollout."""
    if how not in get_args(Aggregation):
        raise ConfigError(f"actor.loss_aggregation is {how!r}: use one of {', '.join(get_args(Aggregation))}")
    if how == "constant" and not length:
        raise ConfigError('actor.loss_aggregation = "constant" needs actor.loss_length: how many tokens to divide by')
    of_step, of_rollout = _members(steps), _members(rollouts)
    here = (len(steps), _distinct(of_step), _distinct(of_rollout))
    tokens, step_count, rollout_count = distributed.sum_over_ranks([float(count) for count in here], steps.device)
    if how == "token":
        return torch.full((len(steps),), 1.0 / max(tokens, 1.0), device=steps.device)
    if how == "step":
        return of_step.mul(max(step_count, 1.0)).reciprocal()
    if how == "rollout":
        return of_rollout.mul(max(rollout_count, 1.0)).reciprocal()
    return torch.full((len(steps),), 1.0 / (max(rollout_count, 1.0) * float(length or 1)), device=steps.device)


def _members(codes: Tensor) -> Tensor:
    """For each token, how many tokens share its code."""
    _, inverse, counts = torch.unique(codes, return_inverse=True, return_counts=True)
    members: Tensor = counts[inverse].float()
    return members


def _distinct(members: Tensor) -> int:
    return round(float((1.0 / members.double()).sum()))
