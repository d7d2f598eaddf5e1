"""Requests with stop strings, masks or reported alternatives decode in windows, as they do step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_cases import VOCABULARY, counted, random_ids, run, tiny
from precision import assert_fp32_close

from toolwise.engine.cpu_runner import CpuRunner
from toolwise.engine.grammar import GrammarError
from toolwise.engine.request import ServingOptions
from toolwise.protocols import Sampling

PROMPTS = [random_ids(length, seed) for seed, length in enumerate((5, 17, 30, 9, 64, 40))]
NEW = 60


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def alternate(sampled: Sequence[int]) -> torch.Tensor:
    """Even tokens, then odd ones."""
    return torch.arange(VOCABULARY) % 2 == len(sampled) % 2


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop_strings": ["never said"]},
    {"logits_mask": alternate},
    {"options": ServingOptions(top_logprobs=3)},
    {"options": ServingOptions(top_p=0.8, top_k=20, top_logprobs=2), "logits_mask": alternate},
    {"stop_strings": ["ab", "zq"], "logits_mask": alternate},
]


def generate(engine: Any, options: Sequence[dict[str, Any]], **sampling: Any) -> list[Any]:
    async def ask() -> list[Any]:
        samplings = [Sampling(**{"max_new_tokens": NEW, "seed": seed, **sampling}) for seed in range(len(options))]
        rows = zip(PROMPTS, samplings, options, strict=False)
        work = (engine.generate(ids, s, **more) for ids, s, more in rows)
        return list(await asyncio.gather(*work, return_exceptions=True))

    return run(ask())


def engines() -> tuple[Any, Any]:
    model = tiny()
    windows, stepwise = (counted(model, blocks=400, decode=letters, fused=fused) for fused in (None, False))
    assert isinstance(windows.runner, CpuRunner)
    assert not isinstance(stepwise.runner, CpuRunner)
    return windows, stepwise


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS[::-1], OPTIONS[1:2] * 6, OPTIONS[2:3] * 6])
def test_replies_are_those_of_decoding_step_by_step(options: list[dict[str, Any]]) -> None:
    windows, stepwise = engines()
    for ours, stock in zip(generate(windows, options), generate(stepwise, options), strict=True):
        assert ours.token_ids == stock.token_ids
        assert ours.finish_reason == stock.finish_reason
        assert_fp32_close(ours.logprobs, stock.logprobs)
        for row, expected in zip(ours.top_logprobs or (), stock.top_logprobs or (), strict=True):
            assert [token for token, _ in row] == [token for token, _ in expected]
    assert windows.metrics()["engine/steps"] < NEW / 4
    assert windows.metrics()["engine/blocks_in_use"] == 0


def test_each_ends_with_the_token_that_completes_its_stop_string() -> None:
    windows, stepwise = engines()
    whole = [letters(result.token_ids) for result in generate(stepwise, [{}] * 6)]
    options = [{"stop_strings": ["never said", text[7 * n + 2 : 7 * n + 5]]} for n, text in enumerate(whole)]
    for text, more, result in zip(whole, options, generate(windows, options), strict=True):
        end = text.index(more["stop_strings"][1]) + 3
        assert letters(result.token_ids) == text[:end]
        assert result.finish_reason == "stop"
        assert len(result.logprobs) == end


def test_the_fault_of_one_in_the_midst_of_a_window_is_no_other_requests() -> None:
    def too_complex(sampled: Sequence[int]) -> torch.Tensor:
        if len(sampled) == 9:
            raise GrammarError("too complex")
        return alternate(sampled)

    def unreadable(ids: Sequence[int]) -> str:
        if len(ids) > 13:
            raise UnicodeError("no such letter")
        return letters(ids)

    windows, stepwise = engines()
    windows.results.decode = stepwise.results.decode = unreadable
    options = [{}, {"logits_mask": too_complex}, {"logits_mask": alternate}, {"stop_strings": ["never said"]}]
    for engine in (windows, stepwise):
        free, complex_, masked, unread = generate(engine, [*options, {}, {}])[:4]
        assert "too complex" in str(complex_)
        assert "cannot be decoded: UnicodeError" in str(unread)
        assert len(free.token_ids) == len(masked.token_ids) == NEW
        assert [token % 2 for token in masked.token_ids] == [0, 1] * (NEW // 2)


def test_tokens_are_reported_while_a_window_is_decoded_under_a_mask() -> None:
    windows, _ = engines()
    pieces: list[Any] = []
    [result] = generate(windows, [{"logits_mask": alternate, "options": ServingOptions(on_sampled=pieces.append)}])
    assert [token for piece in pieces for token in piece.token_ids] == list(result.token_ids)
