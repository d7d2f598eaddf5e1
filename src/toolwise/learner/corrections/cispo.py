"""CISPO (MiniMax-M1, arXiv 2506.13585): the weight is clipped and not the token, so that every token has a gradient.

L = −sg(min(π_θ / μ, 1 + ε_high))·A·log π_θ
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.losses import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class Cispo(Correction):
    """`actor.policy_loss = "cispo"`."""

    high: float = 2.0

    needs_old: ClassVar[bool] = False
    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac", "importance_weight")

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = torch.exp((logprobs - sampled.logprobs).detach().clamp(max=MAX_LOG_RATIO))
        weights = ratio.clamp(max=1.0 + self.high)
        losses = -weights * advantages * logprobs
        return losses, {"clip_frac": (ratio > weights).float(), "importance_weight": weights}
