"""Truncated importance sampling of tokens (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
RL Training"; the truncation is Ionides 2008):

    L = w·PPO(π_θ / π_old, A)        w = sg(min(π_old / μ, C))

The same as `actor.policy_loss = "ppo"` with `actor.old_logprobs = "recompute"`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.losses import PpoClip, importance_weights


@dataclass(frozen=True, slots=True)
class TokenTis(Correction):
    """`actor.policy_loss = "tis"`."""

    ppo: PpoClip = field(default_factory=PpoClip)
    cap: float = 2.0

    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac", "importance_weight", "truncated_frac")

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = self.ppo(logprobs, old_logprobs, advantages, sequences)
        weights = importance_weights(old_logprobs, sampled.logprobs, self.cap)
        truncated = (weights >= self.cap).float()
        return losses * weights, {**metrics, "importance_weight": weights, "truncated_frac": truncated}
