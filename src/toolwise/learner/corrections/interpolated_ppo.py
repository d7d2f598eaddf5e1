"""Decoupled PPO whose proximal policy is interpolated instead of recomputed (AReaL's log-linear approximation, Li et
al. 2025, arXiv 2512.06547), so that several optimiser steps need no extra forward pass:

    log π_prox = log μ + α·sg(log π_θ − log μ)        α = (v_prox − v_μ) / (v_θ − v_μ)

v_μ is the version that sampled the token, v_prox the learner's at the start of the update, v_θ = v_prox + 1 the one
that the update makes. A fresh token has α = 0: π_prox = μ, plain PPO. A token of unknown version counts as fresh.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.corrections.decoupled_ppo import decoupled_loss
from toolwise.learner.losses import PpoClip


@dataclass(frozen=True, slots=True)
class InterpolatedPpo(Correction):
    """`actor.policy_loss = "interpolated"`."""

    ppo: PpoClip = field(default_factory=PpoClip)
    cap: float | None = None

    needs_old: ClassVar[bool] = False
    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac", "importance_weight", "masked_frac")

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        prox = proximal_logprobs(logprobs, sampled)
        return decoupled_loss(self.ppo, self.cap, logprobs, prox, advantages, sequences, sampled.logprobs)


def proximal_logprobs(logprobs: Tensor, sampled: SampledWith) -> Tensor:
    """log π_prox of each token, without a gradient."""
    behind = (sampled.version - sampled.versions).clamp(min=0).to(logprobs.dtype)
    alpha = (behind / (behind + 1.0)).masked_fill(sampled.versions < 0, 0.0)
    prox: Tensor = sampled.logprobs + alpha * (logprobs.detach() - sampled.logprobs)
    return prox
