"""Sampling keyed by seed and position, log-probs after temperature, masks, and faults per request."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import VOCABULARY, random_ids, tiny
from precision import assert_fp32_close

from toolwise.engine.request import Request, ServingOptions
from toolwise.engine.sampler import NUCLEUS_CANDIDATES, NaNLogitsError, draw, sample, score
from toolwise.errors import PolicyError
from toolwise.models.logits import logits_head
from toolwise.protocols import Sampling


def request(sampled: int = 0, **more: Any) -> Request:
    loop = asyncio.new_event_loop()
    try:
        return Request("generate", [1] * (3 + sampled), 3, Sampling(), loop.create_future(), loop, **more)
    finally:
        loop.close()


def test_each_row_has_a_position_of_its_own() -> None:
    logits = torch.zeros(6, 50)
    samplings = [Sampling(seed=7)] * 6
    rows = draw(logits, samplings, [0, 1, 2, 0, 1, 2])[0].tolist()
    assert rows[:3] == rows[3:]
    assert len(set(rows[:3])) > 1


def test_rare_tokens_come_as_often_as_they_should() -> None:
    probabilities = torch.tensor([0.9] + [0.1 / 4095] * 4095)
    n = 4000
    logits = probabilities.log().expand(n, -1)
    tokens = draw(logits, [Sampling(seed=i) for i in range(n)], [0] * n)[0]
    rare = tokens[tokens > 0]
    assert len(rare) == pytest.approx(400, abs=80)
    assert float(rare.float().mean()) == pytest.approx(2048, abs=250)


def test_the_largest_draw_still_has_a_probability() -> None:
    """After the last possible token there are impossible ones."""
    logits = torch.full((1, 64), -torch.inf)
    logits[0, :3] = 0.0
    n = 3000
    tokens = draw(logits.expand(n, -1), [Sampling(seed=i) for i in range(n)], [0] * n)[0]
    assert set(tokens.tolist()) == {0, 1, 2}


def test_a_mask_changes_what_is_drawn_and_not_its_logprob() -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    expected = torch.log_softmax(logits.double(), -1)[0]
    may = torch.zeros(VOCABULARY, dtype=torch.bool)
    may[[4, 9]] = True
    for position in range(8):
        [(token, logprob)] = sample(logits, [request(position, logits_mask=lambda sampled: may)])
        assert token in (4, 9)
        assert_fp32_close(logprob, expected[token])


def test_a_mask_sees_what_was_sampled_and_may_allow_anything() -> None:
    seen: list[list[int]] = []

    def look(sampled: Any) -> None:
        seen.append(list(sampled))

    plain = sample(torch.zeros(1, 9), [request(2)])
    assert sample(torch.zeros(1, 9), [request(2, logits_mask=look)]) == plain
    assert seen == [[1, 1]]


def test_a_mask_that_allows_nothing_is_a_fault_of_that_request_alone() -> None:
    pair = [request(), request(logits_mask=lambda sampled: torch.zeros(9, dtype=torch.bool))]
    sample(torch.zeros(2, 9), pair)
    assert pair[0].fault is None
    assert isinstance(pair[1].fault, PolicyError)
    assert "allows no token" in str(pair[1].fault)


def test_nan_is_a_fault_of_that_request_alone() -> None:
    logits = torch.zeros(3, 9)
    logits[1] = torch.nan
    three = [request() for _ in range(3)]
    sample(logits, three)
    assert [type(r.fault) for r in three] == [type(None), NaNLogitsError, type(None)]


def test_scores_are_logprobs_and_entropies() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logprobs, entropies = score(logits, [3, 1, 4, 1, 5], 0.5)
    expected = torch.distributions.Categorical(logits=logits.double() / 0.5)
    assert_fp32_close(logprobs, expected.log_prob(torch.tensor([3, 1, 4, 1, 5])))
    assert_fp32_close(entropies, expected.entropy(), scale=math.log(40))


def test_the_entropy_of_what_is_certain_is_none() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 2] = 1.0
    assert score(logits, [2], 1.0) == ([0.0], [0.0])


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
def test_a_head_of_fixed_rows_gives_the_same_logits(rows: int) -> None:
    model = tiny("llama")
    states = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        plain, fixed = logits_head(model)(states), logits_head(model, 4)(states)
    torch.testing.assert_close(fixed, plain)
    if rows > 4:
        with torch.inference_mode():
            alone = logits_head(model, 4)(states[4:5])
        assert torch.equal(alone[0], fixed[4]), "to the bit, wherever it stands"


@pytest.mark.parametrize(
    ("setting", "value"), [("final_logit_softcapping", 5.0), ("logit_scale", 0.25), ("logits_scaling", 4.0)]
)
def test_a_family_that_does_more_to_its_logits_is_followed(setting: str, value: float) -> None:
    model = tiny("llama")
    setattr(model.get_decoder().config, setting, value)
    states = torch.randn(2, 32)
    with torch.inference_mode():
        plain = model.lm_head(states)
        found = logits_head(model)(states)
    expected = torch.tanh(plain / 5.0) * 5.0 if setting == "final_logit_softcapping" else plain * 0.25
    torch.testing.assert_close(found, expected)


def test_seeds_of_any_size_and_random_ids() -> None:
    tokens, _ = draw(torch.zeros(2, 8), [Sampling(seed=-1), Sampling(seed=2**70)], [0, 10**6])
    assert set(tokens.tolist()) <= set(range(8))
    assert np.array(random_ids(5, 0)).max() < VOCABULARY


def kept(logits: torch.Tensor, **options: Any) -> set[int]:
    """The tokens that can be drawn."""
    rows, sampling = 400, [Sampling(seed=seed) for seed in range(400)]
    tokens, _ = draw(logits.expand(rows, -1), sampling, [0] * rows, options=[ServingOptions(**options)] * rows)
    return set(tokens.tolist())


def test_top_k_keeps_the_likeliest_and_top_p_their_share_of_it() -> None:
    logits = torch.tensor([0.4, 0.05, 0.3, 0.05, 0.2]).log()[None]
    assert kept(logits) == {0, 1, 2, 3, 4}
    assert kept(logits, top_k=1) == {0}
    assert kept(logits, top_k=3) == {0, 2, 4}
    assert kept(logits, top_p=0.39) == {0}
    assert kept(logits, top_p=0.41) == {0, 2}
    assert kept(logits, top_p=0.89) == {0, 2, 4}
    assert kept(logits, top_k=2, top_p=0.5) == {0}  # 0.4 / 0.7 of what top_k leaves


def test_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    logits = torch.zeros(1, 4 * NUCLEUS_CANDIDATES)
    drawn = kept(logits, top_p=0.5)
    assert len(drawn) > 300  # nearly all of 400 draws differ


def test_truncation_leaves_log_probs_and_other_rows_alone() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    samplings, positions = [Sampling(seed=n) for n in range(3)], [4, 5, 6]
    plain = draw(logits, samplings, positions)
    options = [ServingOptions(), ServingOptions(top_k=2), ServingOptions()]
    tokens, logprobs = draw(logits, samplings, positions, options=options)
    assert [int(tokens[row]) for row in (0, 2)] == [int(plain[0][row]) for row in (0, 2)]
    assert int(tokens[1]) in logits[1].topk(2).indices.tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(1, tokens[:, None]).squeeze(1))


def test_truncation_stays_within_a_mask() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    allowed = torch.tensor([[False, True, False, True]])
    tokens, _ = draw(logits, [Sampling(seed=1)], [0], allowed, [ServingOptions(top_k=1)])
    assert tokens.tolist() == [1]


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"top_logprobs": 21}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="top_p must be"):
        ServingOptions(**options)
