"""Decoupled PPO (Hilton et al. 2022, arXiv 2110.00641; AReaL, Fu et al. 2025, arXiv 2505.24298): the policy that the
clip stays close to, π_prox, is not the one that sampled, μ.

    L = sg(π_prox / μ)·PPO(π_θ / π_prox, A)

π_prox is the learner's at the start of the update, recomputed unless the update is one step. A token whose weight
exceeds `cap` is left out, as AReaL does; by default none is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.losses import MAX_LOG_RATIO, PpoClip


@dataclass(frozen=True, slots=True)
class DecoupledPpo(Correction):
    """`actor.policy_loss = "decoupled"`."""

    ppo: PpoClip = field(default_factory=PpoClip)
    cap: float | None = None

    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac", "importance_weight", "masked_frac")

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return decoupled_loss(self.ppo, self.cap, logprobs, old_logprobs, advantages, sequences, sampled.logprobs)


def decoupled_loss(
    ppo: PpoClip,
    cap: float | None,
    logprobs: Tensor,
    prox: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    behaviour: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss for given log π_prox and log μ."""
    losses, metrics = ppo(logprobs, prox, advantages, sequences)
    weights = torch.exp((prox - behaviour).detach().clamp(max=MAX_LOG_RATIO))
    masked = torch.zeros_like(weights, dtype=torch.bool) if cap is None else weights > cap
    weights = weights.masked_fill(masked, 0.0)
    return losses * weights, {**metrics, "importance_weight": weights, "masked_frac": masked.float()}
