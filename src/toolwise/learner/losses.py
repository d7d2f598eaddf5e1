"""PPO losses (Schulman et al. 2017, arXiv 1707.06347), per token. With ρ = exp(log π − log π_old):

    policy     L = −min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A)      and for A < 0 at most −c·A (dual clip, Ye et al.
                                                                    2019, arXiv 1912.09729)
    value      L = ½·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²)
    weight     w = min(π_old / π_rollout, C), detached              if π_old is not the policy that sampled the tokens

There is one importance correction, never two: either the rollout's log-probs are log π_old and there is no w, or the
learner recomputes log π_old and w corrects for the rest. Nothing here sums over tokens; see `loss_aggregation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8 is already meaningless as a ratio; unbounded it would overflow, and inf · 0 is NaN."""


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Per-token losses, and a mask of where a clip is active."""
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    unclipped = ratio * advantages
    gain, is_clipped = torch.minimum(unclipped, clipped), clipped < unclipped
    if dual_clip is not None:
        floor = dual_clip * advantages
        below_floor = (advantages < 0) & (gain < floor)
        gain, is_clipped = torch.where(below_floor, floor, gain), is_clipped | below_floor
    return -gain, is_clipped


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token losses, and a mask of where the clip is active."""
    unclipped = (values - returns).square()
    if clip is None:
        return 0.5 * unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (clipped_values - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """π_old / π_rollout for each token, capped at `cap` and detached."""
    return torch.exp((old_logprobs - rollout_logprobs).detach().clamp(max=MAX_LOG_RATIO)).clamp(max=cap)
