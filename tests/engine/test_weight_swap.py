"""New weights in flight: a reply that is being written goes on with them, and each token knows which it is from."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from learner_cases import tiny_model

from toolwise.engine import Engine
from toolwise.engine.weight_swap import fingerprint, replace_weights, tokens_in_flight
from toolwise.protocols import Generation, Sampling

torch.set_num_threads(1)
PROMPT = [5, 9, 3, 7, 11]


def write(target: Any, source: Any) -> None:
    with torch.no_grad():
        for parameter, other in zip(target.parameters(), source.parameters(), strict=True):
            parameter.copy_(other)


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """Of each reply token under `model`, in one pass."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0].float().log_softmax(-1)
    return [logits[len(PROMPT) - 1 + place, token].item() for place, token in enumerate(ids)]


async def swapped_in_flight(engine: Engine, new: Any, after: int, count: int) -> Generation:
    """A reply of `count` tokens, whose weights are replaced when `after` of them have been seen."""
    seen: list[int] = []
    enough = asyncio.Event()

    def on_tokens(tokens: Any) -> None:
        seen.extend(tokens)
        if len(seen) >= after:
            enough.set()

    sampling = Sampling(max_new_tokens=count, seed=3)
    reply = asyncio.ensure_future(engine.generate(PROMPT, sampling, on_tokens=on_tokens))
    await enough.wait()
    assert tokens_in_flight(engine) >= len(PROMPT) + after
    await replace_weights(engine, lambda: write(engine.model, new), 1)
    assert engine.version == 1
    return await reply


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_token_has_the_log_prob_and_the_version_of_the_weights_that_sampled_it(deterministic: bool) -> None:
    old, new = tiny_model(0, max_position_embeddings=512), tiny_model(1, max_position_embeddings=512)
    before = copy.deepcopy(old)
    engine = Engine(old, blocks=64, deterministic=deterministic)
    try:
        reply = asyncio.run(swapped_in_flight(engine, new, 4, 400))
    finally:
        engine.close()
    assert reply.token_versions is not None
    versions, ids = list(reply.token_versions), list(reply.token_ids)
    change = versions.index(1)
    assert versions == [0] * change + [1] * (len(ids) - change)
    assert change >= 4
    assert reply.policy_version == 0
    first, second = logprobs_of(before, ids), logprobs_of(new, ids)
    expected = first[:change] + second[change:]
    assert torch.tensor(expected).sub(torch.tensor(list(reply.logprobs))).abs().max() < 1e-4


def test_an_idle_engine_takes_new_weights_at_once_and_forgets_its_prefixes() -> None:
    old, new = tiny_model(0), tiny_model(1)
    engine = Engine(old, blocks=64)
    sampling = Sampling(max_new_tokens=8, seed=3)

    async def work() -> tuple[Generation, Generation]:
        await engine.generate(PROMPT, sampling)
        await replace_weights(engine, lambda: write(engine.model, new), 7)
        return await engine.generate(PROMPT, sampling), await Engine(new, blocks=64).generate(PROMPT, sampling)

    try:
        ours, fresh = asyncio.run(work())
    finally:
        engine.close()
    assert list(ours.token_ids) == list(fresh.token_ids)
    assert ours.policy_version == 7


def test_a_failing_write_is_the_callers_error() -> None:
    engine = Engine(tiny_model(0), blocks=64)

    def fail() -> None:
        raise KeyError("no such weight")

    try:
        with pytest.raises(KeyError, match="no such weight"):
            asyncio.run(replace_weights(engine, fail, 1))
    finally:
        engine.close()


def test_the_fingerprint_changes_with_every_write() -> None:
    weights = [torch.zeros(2), torch.zeros(3)]
    before = fingerprint(weights)
    weights[1].add_(1.0)
    assert fingerprint(weights) != before
