"""Continuations scored in packed passes: shared prefixes are computed once, and packing does not change the scores."""

from __future__ import annotations

from copy import deepcopy
from math import log
from typing import Any

import pytest
import torch
from learner_cases import tiny_model
from precision import assert_fp32_close

from toolwise.config.schema import ActorConfig
from toolwise.learner import continuation_scores
from toolwise.learner.continuation_scores import ContinuationScorer
from toolwise.learner.forward import hidden_states
from toolwise.learner.packing import Packed
from toolwise.thinking.thinking_model import ScoringRequest

CONTEXTS = [
    ScoringRequest([3, 4, 5, 6, 7, 8], ([9, 10], [9, 11, 12], [13])),
    ScoringRequest([3, 4, 5, 6, 7, 8, 9, 14], ([9, 10],)),
    ScoringRequest([20], ([21, 22, 23],)),
]


def test_scores_equal_one_at_a_time_for_any_micro_batch_size() -> None:
    model = tiny_model()
    exact = deepcopy(model).double()
    for cut in (
        ActorConfig(),
        ActorConfig(share_prefixes=False),
        ActorConfig(micro_batch_tokens=6, logit_chunk_tokens=2),
    ):
        found = ContinuationScorer(model, cut)(CONTEXTS, 0.7)
        for context, scores in zip(CONTEXTS, found, strict=True):
            for ids, score in zip(context.continuations, scores, strict=True):
                with torch.no_grad():
                    logits = exact(input_ids=torch.tensor([[*context.prefix_ids, *ids]])).logits[0]
                logp = torch.log_softmax(logits[len(context.prefix_ids) - 1 : -1] / 0.7, -1)
                assert_fp32_close(score.logprobs, logp.gather(-1, torch.tensor(ids)[:, None])[:, 0])
                assert_fp32_close(score.entropies, -(logp.exp() * logp).sum(-1), scale=log(model.config.vocab_size))


def test_what_contexts_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counted(model: Any, packed: Packed) -> torch.Tensor:
        computed.append(packed.T)
        return hidden_states(model, packed)

    monkeypatch.setattr(continuation_scores, "hidden_states", counted)
    for share in (True, False):
        ContinuationScorer(tiny_model(), ActorConfig(share_prefixes=share))(CONTEXTS)
    # The last token of each row predicts nothing: 6 + (9) + (11) of one history, 14 after it, 9 again, and 20 21 22.
    assert computed == [6 + 1 + 1 + 1 + 1 + 3, 7 + 8 + 6 + 9 + 3]


def test_nothing_to_score_is_nothing() -> None:
    assert ContinuationScorer(tiny_model(), ActorConfig())([]) == []
