"""The mask of DPPO (Qi et al. 2026, arXiv 2602.04879) in its binary form for the total variation: a trust region in
probabilities instead of ratios, so that rare tokens, whose ratios vary most, are not the ones that are clipped.

    L = −M·(π_θ / μ)·A        M = 0 if A > 0 and p_θ − p_μ > δ, or A < 0 and p_μ − p_θ > δ; else 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.losses import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class DppoMask(Correction):
    """`actor.policy_loss = "dppo"`."""

    threshold: float = 0.2

    needs_old: ClassVar[bool] = False
    metric_names: ClassVar[tuple[str, ...]] = ("importance_weight", "masked_frac")

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = torch.exp((logprobs - sampled.logprobs).clamp(max=MAX_LOG_RATIO))
        moved = torch.exp(logprobs.detach()) - torch.exp(sampled.logprobs)
        masked = moved * torch.sign(advantages) > self.threshold
        losses = (-ratio * advantages).masked_fill(masked, 0.0)
        return losses, {"importance_weight": ratio.detach(), "masked_frac": masked.float()}
