"""Batched generation: the same tokens in any batch, and log-probs that a teacher-forced pass reproduces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import quick_first
from transformers import LlamaConfig
from transformers.cache_utils import DynamicLayer

from toolwise.engine.sampler import draw, uniforms
from toolwise.errors import PolicyError
from toolwise.models import load_model
from toolwise.policies.transformers_generation import BatchGenerator, PreallocatedLayer, generate_batch
from toolwise.protocols import Generation, Sampling

torch.set_num_threads(1)
QUESTIONS = [
    "What is 2 + 2?",
    "Hi",
    "Which river is longer, and by how many kilometres, the Nile or the Rhine? Say why you think so, at length.",
    "Add 17 to 25, then double it.",
]


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


def prompt(text: str) -> list[int]:
    ids: list[int] = loaded()[1].encode(f"<|user|>{text}<|end|><|assistant|>")
    return ids


PROMPTS = [prompt(text) for text in QUESTIONS]


def generate(prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Generation]:
    model, chat = loaded()
    return generate_batch(model, prompts, samplings, pad_id=chat.pad_id, policy_version=3)


@torch.inference_mode()
def forced(ids: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probs over the vocabulary at each position of `tokens`, from one unpadded forward pass."""
    logits = loaded()[0](input_ids=torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def assert_same_draws(ids: Sequence[int], one: Generation, other: Generation, sampling: Sampling) -> None:
    """Equal tokens, except where rounding decided between near-equal candidates."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), None)
    if place is None:
        assert list(one.token_ids) == list(other.token_ids)
        assert list(one.logprobs) == pytest.approx(list(other.logprobs), abs=1e-4)
        return
    logprobs = forced(ids, one.token_ids[: place + 1], sampling.temperature)[place]
    if sampling.do_sample:
        u = uniforms(np.array([sampling.seed], dtype=np.uint64), np.array([place]))[0]
        margin = float((logprobs.double().exp().cumsum(-1) - u).abs().min())
    else:
        best = logprobs.topk(2).values
        margin = float(best[0] - best[1])
    assert margin < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_logprobs_are_those_of_a_teacher_forced_pass(temperature: float) -> None:
    prompts = [p for p in PROMPTS for _ in range(3)]
    samplings = [Sampling(temperature=temperature, max_new_tokens=24, seed=i) for i in range(len(prompts))]
    for ids, result in zip(prompts, generate(prompts, samplings), strict=True):
        tokens = list(result.token_ids)
        expected = forced(ids, tokens, temperature)[range(len(tokens)), tokens]
        assert list(result.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


def test_greedy_logprobs_too_are_taken_after_temperature() -> None:
    sampling = Sampling(temperature=0.5, max_new_tokens=8, do_sample=False)
    result = generate(PROMPTS[:1], [sampling])[0]
    expected = forced(PROMPTS[0], result.token_ids, 0.5).max(-1).values
    assert list(result.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("temperature", quick_first([1.0, 0.7, 3.0], [0.7]))
def test_company_and_order_change_nothing(do_sample: bool, temperature: float) -> None:
    prompts = [p for p in PROMPTS for _ in range(2)]
    samplings = [
        Sampling(temperature=temperature, do_sample=do_sample, seed=7 * i, max_new_tokens=6 + 5 * (i % 3))
        for i in range(len(prompts))
    ]
    together = generate(prompts, samplings)
    backwards = generate(prompts[::-1], samplings[::-1])[::-1]
    for ids, sampling, one, two in zip(prompts, samplings, together, backwards, strict=True):
        alone = generate([ids], [sampling])[0]
        assert_same_draws(ids, alone, one, sampling)
        assert_same_draws(ids, alone, two, sampling)


def test_rows_left_over_after_others_ended_at_once_go_on_from_their_own_prompt() -> None:
    """Two prompts twice: when the first two rows end after one token, as many rows remain as there are prompts."""
    first, second = PROMPTS[0], PROMPTS[2]
    short, long = Sampling(max_new_tokens=1, do_sample=False), Sampling(max_new_tokens=12, do_sample=False)
    results = generate([first, first, second, second], [short, short, long, long])
    alone = generate([second], [long])[0]
    for result in results[2:]:
        assert_same_draws(second, alone, result, long)


def test_greedy_is_what_transformers_generates() -> None:
    model, chat = loaded()
    sampling = Sampling(max_new_tokens=20, do_sample=False, stop_token_ids=(chat.end_id,))
    for ids, result in zip(PROMPTS, generate(PROMPTS, [sampling] * len(PROMPTS)), strict=True):
        given = torch.tensor([ids])
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=chat.end_id,
            pad_token_id=chat.pad_id,
        )
        theirs = replace(result, token_ids=out[0, len(ids) :].tolist(), logprobs=result.logprobs)
        assert_same_draws(ids, result, theirs, sampling)


def test_a_stop_token_ends_a_reply_and_is_part_of_it() -> None:
    free = generate([PROMPTS[0]], [Sampling(max_new_tokens=10, seed=5)])[0]
    stop = free.token_ids[4]
    place = list(free.token_ids).index(stop)
    result = generate([PROMPTS[0]], [Sampling(max_new_tokens=10, seed=5, stop_token_ids=(stop,))])[0]
    assert list(result.token_ids) == list(free.token_ids[: place + 1])
    assert len(result.logprobs) == place + 1
    assert result.finish_reason == "stop"


def test_a_reply_without_a_stop_token_has_its_full_length() -> None:
    samplings = [Sampling(max_new_tokens=n, seed=n) for n in (1, 5, 9, 2)]
    results = generate(PROMPTS, samplings)
    assert [len(r.token_ids) for r in results] == [1, 5, 9, 2]
    assert {r.finish_reason for r in results} == {"length"}
    assert {r.policy_version for r in results} == {3}


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    free = generate([PROMPTS[1]], [Sampling(max_new_tokens=1, seed=1)])[0]
    result = generate([PROMPTS[1]], [Sampling(max_new_tokens=1, seed=1, stop_token_ids=(free.token_ids[0],))])[0]
    assert result.finish_reason == "stop"


@contextmanager
def shapes_seen() -> Iterator[list[tuple[int, int]]]:
    """(rows, columns) of every forward pass."""
    seen: list[tuple[int, int]] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(tuple(kwargs["input_ids"].shape))

    handle = loaded()[0].register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def test_equal_prompts_are_run_once() -> None:
    prompts = [PROMPTS[0]] * 5 + [PROMPTS[2]] * 3
    with shapes_seen() as seen:
        results = generate(prompts, [Sampling(temperature=5.0, max_new_tokens=3, seed=i) for i in range(8)])
    assert seen == [(2, len(PROMPTS[2])), (8, 1), (8, 1)]
    assert len({tuple(r.token_ids) for r in results}) == 8


def test_rows_that_are_done_leave_the_batch() -> None:
    with shapes_seen() as seen:
        generate(PROMPTS, [Sampling(max_new_tokens=n) for n in (4, 1, 2, 4)])
    assert seen[1:] == [(3, 1), (2, 1), (2, 1)]


def test_long_replies_outgrow_the_caches_room_and_stay_right() -> None:
    assert PreallocatedLayer.spare_tokens < 150
    sampling = Sampling(max_new_tokens=150, seed=11)
    results = generate(PROMPTS[:2], [sampling, replace(sampling, max_new_tokens=100)])
    for ids, result in zip(PROMPTS, results, strict=False):
        tokens = list(result.token_ids)
        expected = forced(ids, tokens, 1.0)[range(len(tokens)), tokens]
        assert list(result.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


operations = st.lists(
    st.tuples(st.sampled_from(["update", "select", "reorder", "repeat", "crop"]), st.integers(0, 2**16)), max_size=12
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_a_roomy_layer_holds_what_a_plain_one_holds(steps: list[tuple[str, int]]) -> None:
    roomy, plain = PreallocatedLayer(), DynamicLayer()
    roomy.spare_tokens = 3
    generator = torch.Generator().manual_seed(0)
    rows = 3

    def update(columns: int) -> None:
        keys, values = (torch.randn(rows, 2, columns, 4, generator=generator) for _ in range(2))
        for mine, theirs in zip(roomy.update(keys, values), plain.update(keys, values), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)

    update(2)
    for what, number in steps:
        if what == "update":
            update(1 + number % 5)
        elif what == "select":
            index = torch.tensor([(number >> 2 * i) % rows for i in range(1 + number % 4)])
            rows = len(index)
            roomy.batch_select_indices(index)
            plain.batch_select_indices(index)
        elif what == "reorder":
            index = torch.tensor([(number + i) % rows for i in range(rows)])
            roomy.reorder_cache(index)
            plain.reorder_cache(index)
        elif what == "repeat" and rows < 16:
            rows *= 2
            roomy.batch_repeat_interleave(2)
            plain.batch_repeat_interleave(2)
        elif what == "crop" and plain.get_seq_length() > 1:
            roomy.crop(-1)
            plain.crop(-1)
        assert roomy.get_seq_length() == plain.get_seq_length()
    update(1)


def test_a_roomy_layer_can_be_emptied_and_used_again() -> None:
    layer = PreallocatedLayer()
    layer.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4))
    layer.reset()
    keys, _ = layer.update(torch.zeros(5, 1, 2, 4), torch.zeros(5, 1, 2, 4))
    assert keys.shape == (5, 1, 2, 4)
    assert float(keys.sum()) == 0.0


def kolmogorov_smirnov(sample: np.ndarray[Any, Any]) -> float:
    """sqrt(n) times the largest distance to the uniform distribution; exceeds 1.95 once in a thousand."""
    n = len(sample)
    ordered = np.sort(sample)
    steps = np.arange(n) / n
    return float(np.sqrt(n) * max(np.max(ordered - steps), np.max(steps + 1 / n - ordered)))


def many(seeds: Any, positions: Any) -> np.ndarray[Any, Any]:
    seeds, positions = np.broadcast_arrays(np.asarray(seeds, dtype=np.uint64), np.asarray(positions))
    return uniforms(seeds, positions)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (np.arange(20_000), 0),
        (np.arange(20_000) * 4099 * 1_000_003, 3),
        (12345, np.arange(20_000)),
        (2**64 - 1 - np.arange(20_000, dtype=np.uint64), 1),
    ],
    ids=["seeds", "seeds as the scheduler makes them", "positions", "large seeds"],
)
def test_draws_are_uniform(seeds: Any, positions: Any) -> None:
    sample = many(seeds, positions)
    assert sample.min() >= 0.0
    assert sample.max() < 1.0
    assert kolmogorov_smirnov(sample) < 1.95
    counts = np.histogram(sample, bins=64, range=(0, 1))[0]
    chi_square = float(((counts - len(sample) / 64) ** 2 / (len(sample) / 64)).sum())
    assert chi_square < 63 + 4 * np.sqrt(2 * 63)


@pytest.mark.parametrize("gap", [1, 2, 4099, 1_000_003, 2**32])
def test_neighbouring_seeds_have_nothing_to_do_with_each_other(gap: int) -> None:
    seeds, n = np.arange(20_000, dtype=np.uint64), 20_000
    for position in (0, 5):
        r = np.corrcoef(many(seeds, position), many(seeds + np.uint64(gap), position))[0, 1]
        assert abs(r) * np.sqrt(n) < 4
    across = np.corrcoef(many(7, np.arange(n)), many(7 + gap, np.arange(n)))[0, 1]
    assert abs(across) * np.sqrt(n) < 4


def test_neighbouring_positions_have_nothing_to_do_with_each_other() -> None:
    seeds, n = np.arange(20_000), 20_000
    assert abs(np.corrcoef(many(seeds, 0), many(seeds, 1))[0, 1]) * np.sqrt(n) < 4
    assert len(np.unique(many(np.arange(300)[:, None], np.arange(300)[None, :]).ravel())) == 90_000


def test_tokens_come_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25])
    n = 20_000
    logits = probabilities.log().expand(n, -1)
    tokens, logprobs = draw(logits, [Sampling(seed=i) for i in range(n)], [2] * n)
    counts = torch.bincount(tokens, minlength=5)
    assert counts[1] == 0
    kept = torch.tensor([0, 2, 3, 4])
    expected = n * probabilities[kept]
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 21.1  # once in ten thousand at 3 degrees
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])


def test_temperature_and_greed_are_each_rows_own() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]]).expand(4, -1)
    samplings = [
        Sampling(do_sample=False),
        Sampling(do_sample=False, temperature=0.5),
        Sampling(seed=1, temperature=0.01),
        Sampling(seed=1, temperature=100.0),
    ]
    tokens, logprobs = draw(logits, samplings, [0] * len(samplings))
    assert tokens[:3].tolist() == [2, 2, 2]
    expected = torch.log_softmax(logits[:2] / torch.tensor([[1.0], [0.5]]), -1)[:, 2]
    torch.testing.assert_close(logprobs[:2], expected)
    assert float(logprobs[3]) == pytest.approx(-np.log(3), abs=0.05)


def test_logits_in_half_precision_are_summed_in_full() -> None:
    logits = torch.randn(1, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, logprobs = draw(logits, [Sampling(do_sample=False)], [0])
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.log_softmax(logits.float(), -1).max(-1).values)


@pytest.mark.parametrize("seed", [-1, 2**70, 0])
def test_any_integer_will_do_for_a_seed(seed: int) -> None:
    tokens, _ = draw(torch.zeros(1, 8), [Sampling(seed=seed)], [0])
    assert 0 <= int(tokens[0]) < 8


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_model_that_gives_nan_is_named_and_not_sampled_from(do_sample: bool) -> None:
    def spoil(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits * float("nan")
        return output

    handle = loaded()[0].register_forward_hook(spoil)
    try:
        with pytest.raises(PolicyError, match="NaN"):
            generate(PROMPTS[:1], [Sampling(max_new_tokens=2, do_sample=do_sample)])
    finally:
        handle.remove()


class Panic(BaseException):
    """Like a panic in a Rust extension."""


def test_nobody_waits_for_ever_after_a_panic() -> None:
    class Panicking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.config = LlamaConfig(num_hidden_layers=1)

        def forward(self, **_: Any) -> Any:
            raise Panic("index out of bounds")

    async def whole() -> list[Any]:
        batches = BatchGenerator(Panicking(), 0, 4)
        asked = [asyncio.wait_for(batches.generate([1, 2], Sampling()), 20) for _ in range(3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    for fault in asyncio.run(whole()):
        assert isinstance(fault, PolicyError)
        assert "Panic: index out of bounds" in str(fault)
