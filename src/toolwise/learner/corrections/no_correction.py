"""No correction: PPO against the learner's own log-probs, as if it had sampled the tokens itself.

    L = PPO(π_θ / π_old, A)

For comparison: in one published sweep a run of it collapsed at a staleness of 1. `actor.policy_loss = "ppo"` with
`actor.old_logprobs = "rollout"` clips against the policy that sampled, which is a correction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.losses import PpoClip


@dataclass(frozen=True, slots=True)
class NoCorrection(Correction):
    """`actor.policy_loss = "none"`."""

    ppo: PpoClip = field(default_factory=PpoClip)

    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac",)

    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.ppo(logprobs, old_logprobs, advantages, sequences)
