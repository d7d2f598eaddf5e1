"""What an update computes for each token besides its loss: log-prob gap, entropy, and whether the loss clipped it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from toolwise.learner.batch import Batch
from toolwise.types import CreditedRollout, UpdatedTokens

EXCLUDED_METRICS = ("clip_frac", "masked_frac", "truncated_frac")
"""Metrics of a policy loss that are 1 for tokens whose gradient it bounds or drops."""


class TokenStatistics:
    """Collects columns of a batch while the micro-batches of its optimizer steps are computed."""

    def __init__(self, batch: Batch) -> None:
        shape, device = (len(batch),), batch.device
        self._batch = batch
        self._logprobs = torch.full(shape, torch.nan, device=device)
        self._entropies = torch.full(shape, torch.nan, device=device)
        self._clipped = torch.zeros(shape, dtype=torch.bool, device=device)

    def add(self, columns: Tensor, logprobs: Tensor, entropies: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Log-probs and entropies of a token count once, before its first gradient; clips of later steps count too."""
        seen = ~torch.isnan(self._logprobs[columns])
        for column, values in ((self._logprobs, logprobs), (self._entropies, entropies)):
            column[columns] = torch.where(seen, column[columns], values.detach().float())
        for name in EXCLUDED_METRICS:
            if name in metrics:
                self._clipped[columns] |= metrics[name].detach() > 0

    def per_rollout(self, credited: Sequence[CreditedRollout]) -> dict[str, UpdatedTokens]:
        """By rollout id; the rollouts of the batch, in its order."""
        if not credited:  # another process has them all
            return {}
        gaps = (self._logprobs - self._batch.rollout_logprobs).cpu().numpy()
        entropies, clipped = self._entropies.cpu().numpy(), self._clipped.cpu().numpy()
        ends = np.cumsum([sum(map(len, rollout.advantages)) for rollout in credited])[:-1]
        columns = zip(credited, *(np.split(column, ends) for column in (gaps, entropies, clipped)), strict=True)
        return {rollout.rollout.rollout_id: UpdatedTokens(*arrays) for rollout, *arrays in columns}
