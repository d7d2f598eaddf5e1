"""GSPO (Zheng et al. 2025, arXiv 2507.18071): one ratio for a whole sequence, clipped as a whole.

    s = exp(mean(log π_θ − log μ))        L = −min(s·A, clip(s, 1 − ε_low, 1 + ε_high)·A)

Each token has the value s and, as in the paper's token-level form, the gradient s·∇log π_θ of its own log-prob.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith, sequence_means
from toolwise.learner.losses import clipped_policy_loss


@dataclass(frozen=True, slots=True)
class Gspo(Correction):
    """`actor.policy_loss = "gspo"`."""

    low: float = 3e-4
    high: float = 4e-4

    needs_old: ClassVar[bool] = False
    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac",)

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = sequence_means(logprobs - sampled.logprobs, sequences) + (logprobs - logprobs.detach())
        losses, clipped = clipped_policy_loss(
            log_ratio, log_ratio.new_zeros(()), advantages, clip_low=self.low, clip_high=self.high
        )
        return losses, {"clip_frac": clipped.float()}
