"""What a correction for stale tokens is: a policy loss that also sees which weights each token was sampled with."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from toolwise.protocols import PolicyLoss


@dataclass(frozen=True, slots=True)
class SampledWith:
    """How the tokens were sampled, one entry per token."""

    logprobs: Tensor
    """log μ, at the time of sampling."""
    versions: Tensor
    """Version of the weights; −1 if unknown."""
    version: int
    """Version of the learner's weights at the start of the update."""


class Correction(PolicyLoss):
    """Called with log π_θ, log π_old, advantages and sequences as any policy loss, and with `SampledWith`.

    It contains the whole importance correction: no further weight is applied to it. Where a rollout is a single
    sequence (no context was rewritten), a rule about sequences is one about rollouts.
    """

    needs_old: ClassVar[bool] = True
    """Whether `old_logprobs` must be those of the learner at the start of the update; else they are log μ."""

    @abstractmethod
    def corrected(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, sampled: SampledWith
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses and metrics, one entry per token. Only `logprobs` has a gradient."""

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """For tokens that the old policy sampled itself."""
        fresh = SampledWith(old_logprobs, torch.zeros_like(sequences), 0)
        return self.corrected(logprobs, old_logprobs, advantages, sequences, fresh)


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    """For each token, the mean of `values` over its sequence; without a gradient."""
    _, index, counts = torch.unique(sequences, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add_(0, index, values.detach())
    means: Tensor = (sums / counts)[index]
    return means
