"""The clipped policy-gradient loss of PPO (Schulman et al. 2017, arXiv 1707.06347), per token:

    ρ = exp(log π − log π_old)        L = −min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A)

Summed over sampled tokens and divided by a count the caller gives, so that loss and gradient do not depend on how a
batch was cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond this a ratio is 5e8 and says nothing more; unbounded it overflows, and infinity times 0 is not a number."""


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Per-token losses, and where the clip was active."""
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain, bounded = ratio * advantages, clipped * advantages
    return -torch.minimum(plain, bounded), bounded < plain


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and the entropy of its distribution, after temperature, in fp32."""
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, token_ids[..., None]).squeeze(-1), entropy
