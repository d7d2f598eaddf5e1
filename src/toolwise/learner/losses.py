"""The losses of PPO (Schulman et al. 2017, arXiv 1707.06347), per token. With ρ = exp(log π − log π_old):

    policy     L = −min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A)      and for A < 0 never more than −c·A (dual clip,
                                                                    Ye et al. 2019, arXiv 1912.09729)
    value      L = ½·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²)
    weight     w = min(π_old / π_rollout, C), detached              where π_old is not what the tokens were drawn with

One importance correction, never two: either the rollout's own log-probs are log π_old and there is no w, or log π_old
is taken again by the learner and w carries the rest. Nothing here sums over tokens: `aggregation.py` weighs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond this a ratio is 5e8 and says nothing more; unbounded it overflows, and infinity times 0 is not a number."""


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Per-token losses, and where a clip was active."""
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    plain = ratio * advantages
    gain, active = torch.minimum(plain, bounded), bounded < plain
    if dual_clip is not None:
        floor = dual_clip * advantages
        far = (advantages < 0) & (gain < floor)
        gain, active = torch.where(far, floor, gain), active | far
    return -gain, active


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token losses, and where the clip was active: there a value has moved far enough for one update."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns).square()
    return 0.5 * torch.maximum(plain, bounded), bounded > plain


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """How much likelier the learner's π_old finds each token than the policy that drew it, at most `cap`; detached."""
    return torch.exp((old_logprobs - rollout_logprobs).detach().clamp(max=MAX_LOG_RATIO)).clamp(max=cap)
