"""IcePop (Ling team 2025, arXiv 2510.18855): importance weights within bounds, and no token beyond them.

L = sg(M(π_old / μ))·PPO(π_θ / π_old, A)        M(k) = k if low ≤ k ≤ high, else 0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.losses import MAX_LOG_RATIO, PpoClip


@dataclass(frozen=True, slots=True)
class IcePop(Correction):
    """`actor.policy_loss = "icepop"`."""

    ppo: PpoClip = field(default_factory=PpoClip)
    low: float = 0.5
    high: float = 5.0

    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac", "importance_weight", "masked_frac")

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = self.ppo(logprobs, old_logprobs, advantages, sequences)
        weights = torch.exp((old_logprobs - sampled.logprobs).detach().clamp(max=MAX_LOG_RATIO))
        masked = (weights < self.low) | (weights > self.high)
        weights = weights.masked_fill(masked, 0.0)
        return losses * weights, {**metrics, "importance_weight": weights, "masked_frac": masked.float()}
