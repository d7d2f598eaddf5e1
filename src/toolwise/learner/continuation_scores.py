"""Teacher-forced scores of given continuations: log-prob and entropy of each token, in packed passes that compute
shared prefixes once. The thinking stage scores actions with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from toolwise.config.schema import ActorConfig
from toolwise.learner.forward import can_share_prefixes, hidden_states, prefers_node_layout, token_logprobs
from toolwise.learner.packing import micro_batches
from toolwise.thinking.thinking_model import ScoringRequest, TokenScores


@dataclass(frozen=True, slots=True)
class _Row:
    ids: list[int]
    sampled: list[bool]


class ContinuationScorer:
    """Scores with the learner's model."""

    def __init__(self, model: Any, config: ActorConfig) -> None:
        self.model = model
        self.config = config

    @torch.no_grad()
    def __call__(self, contexts: Sequence[ScoringRequest], temperature: float = 1.0) -> list[tuple[TokenScores, ...]]:
        rows = [
            _Row([*c.prefix_ids, *ids], [False] * len(c.prefix_ids) + [True] * len(ids))
            for c in contexts
            for ids in c.continuations
        ]
        row_scores = [np.zeros((2, len(row.ids)), np.float32) for row in rows]
        device = next(self.model.parameters()).device
        share = self.config.share_prefixes and can_share_prefixes(self.model)
        nodes = prefers_node_layout(self.model)
        for packed in micro_batches(rows, self.config.pass_tokens, share_prefixes=share, device=device, nodes=nodes):
            hidden = hidden_states(self.model, packed)
            logprobs, entropies = token_logprobs(
                self.model, hidden, packed, temperature, chunk_tokens=self.config.logit_chunk_tokens
            )
            values = torch.stack([logprobs, entropies]).float().cpu().numpy()
            of_row, position = packed.row.cpu().numpy(), packed.at.cpu().numpy()
            for index in np.unique(of_row):
                in_row = of_row == index
                row_scores[index][:, position[in_row]] = values[:, in_row]
        scores = iter(row_scores)
        return [
            tuple(TokenScores(*next(scores)[:, len(c.prefix_ids) :].copy()) for _ in c.continuations) for c in contexts
        ]
