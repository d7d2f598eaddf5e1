"""The slow reference: it scores its own samples with the same log-probs, padded or not."""

from __future__ import annotations

import asyncio

import pytest
from precision import assert_fp32_close
from reference_model import ReferenceModel
from thinking_cases import history, small, teacher_forced

from toolwise.protocols import Sampling
from toolwise.thinking.thinking_model import ScoringRequest


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_sampled_and_scored_log_probs_agree(padding: str) -> None:
    model = ReferenceModel(small()[0], padding)  # type: ignore[arg-type]
    drawn = asyncio.run(model.generate(history(), Sampling(temperature=0.8, max_new_tokens=5, seed=3)))
    contexts = [ScoringRequest(history(), (drawn.token_ids, [*drawn.token_ids, 5, 6]))]
    [[found, longer]] = asyncio.run(model.score(contexts, 0.8))
    assert_fp32_close(found.logprobs, drawn.logprobs)
    assert_fp32_close(longer.logprobs[: len(found.logprobs)], drawn.logprobs)
    assert_fp32_close(found.logprobs, teacher_forced(history(), drawn.token_ids, 0.8))


def test_stop_tokens_and_greedy_sampling() -> None:
    model = ReferenceModel(small()[0])
    first = asyncio.run(model.generate(history(), Sampling(do_sample=False, max_new_tokens=3)))
    assert (len(first.token_ids), first.finish_reason) == (3, "length")
    stop = Sampling(do_sample=False, max_new_tokens=3, stop_token_ids=(first.token_ids[0],))
    again = asyncio.run(model.generate(history(), stop))
    assert (list(again.token_ids), again.finish_reason) == ([first.token_ids[0]], "stop")
