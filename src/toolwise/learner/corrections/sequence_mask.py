"""Geometric sequence mask (Liu et al. 2025, "When Speed Kills Stability"): a sequence counts only if the learner and
the policy that sampled it agree on it, by the geometric mean of the ratios of its tokens.

    L = M·PPO(π_θ / π_old, A)        M = 1 if low ≤ exp(mean(log π_old − log μ)) ≤ high, else 0

It filters and does not weight: what is kept counts as sampled by π_old.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith, sequence_means
from toolwise.learner.losses import MAX_LOG_RATIO, PpoClip


@dataclass(frozen=True, slots=True)
class SequenceMask(Correction):
    """`actor.policy_loss = "sequence_mask"`."""

    ppo: PpoClip = field(default_factory=PpoClip)
    low: float = 0.99
    high: float = 1.01

    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac", "masked_frac")

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = self.ppo(logprobs, old_logprobs, advantages, sequences)
        ratios = torch.exp(sequence_means(old_logprobs - sampled.logprobs, sequences).clamp(max=MAX_LOG_RATIO))
        masked = (ratios < self.low) | (ratios > self.high)
        return losses.masked_fill(masked, 0.0), {**metrics, "masked_frac": masked.float()}
