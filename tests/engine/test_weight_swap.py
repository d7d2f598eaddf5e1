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


async def swapped_in_flight(
    engine: Engine, new: Any, after: int, count: int, *, keep_cache: bool = False, at: list[int] | None = None
) -> Generation:
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

    def swap() -> None:
        write(engine.model, new)
        if at is not None:
            at.extend(request.sampled for request in engine.scheduler.requests)

    await replace_weights(engine, swap, 1, keep_cache=keep_cache)
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


@pytest.mark.parametrize("fused", [None, False], ids=["many steps at once", "step by step"])
def test_a_reply_that_keeps_its_cache_goes_on_with_it_and_counts_as_old(fused: bool | None) -> None:
    """Its later tokens come from the new weights on the keys and values of the old. As the learner cannot compute that,
    none of them is of the new version: neither the mismatch check nor a fresh ratio may use them."""
    old, new = tiny_model(0, max_position_embeddings=512), tiny_model(1, max_position_embeddings=512)
    before, at = copy.deepcopy(old), []
    engine = Engine(old, blocks=64, fused=fused)
    sampling = Sampling(max_new_tokens=8, seed=3)

    async def work() -> tuple[Generation, float, Generation, Generation]:
        reply = await swapped_in_flight(engine, new, 4, 400, keep_cache=True, at=at)
        prefilled = engine.metrics()["engine/prefilled_tokens"]
        known = await engine.generate(PROMPT, sampling)
        return reply, prefilled, known, await Engine(new, blocks=64).generate(PROMPT, sampling)

    try:
        reply, prefilled, ours, fresh = asyncio.run(work())
    finally:
        engine.close()
    [change], ids = at, list(reply.token_ids)
    assert prefilled == len(PROMPT)
    assert 4 <= change < len(ids)
    assert (reply.policy_version, reply.token_versions) == (0, None)
    # the last token sampled before the change is computed after it
    with torch.no_grad():
        cached = before(torch.tensor([PROMPT + ids[: change - 1]]), use_cache=True).past_key_values
        logits = new(torch.tensor([ids[change - 1 :]]), past_key_values=cached).logits[0].float().log_softmax(-1)
    mixed = [logits[place, token].item() for place, token in enumerate(ids[change:])]
    expected = logprobs_of(before, ids)[:change] + mixed
    assert torch.tensor(expected).sub(torch.tensor(list(reply.logprobs))).abs().max() < 1e-4
    assert torch.tensor(logprobs_of(new, ids)[change:]).sub(torch.tensor(mixed)).abs().max() > 0.01
    assert list(ours.token_ids) == list(fresh.token_ids)
    assert ours.policy_version == 1
    assert engine.blocks.in_use == 0


def test_a_second_change_keeps_the_oldest_version_and_a_new_computation_ends_it() -> None:
    """A reply that is preempted is computed again, by the weights of that moment."""
    engine = Engine(tiny_model(0, max_position_embeddings=512), blocks=64, fused=False)
    models = [tiny_model(seed, max_position_embeddings=512) for seed in (1, 2, 3)]
    step = engine.step

    def stepping() -> None:
        step()
        if engine.steps in (10, 20, 30):
            version = engine.steps // 10
            new = models[version - 1]
            engine.weights_changed(version, keep_cache=version < 3, write=lambda: write(engine.model, new))

    engine.step = stepping  # type: ignore[method-assign]
    try:
        reply = asyncio.run(engine.generate(PROMPT, Sampling(max_new_tokens=60, seed=3)))
    finally:
        engine.close()
    assert list(reply.token_versions or ()) == [0] * 30 + [3] * 30
    assert (
        torch.tensor(logprobs_of(models[2], list(reply.token_ids))[30:])
        .sub(torch.tensor(list(reply.logprobs)[30:]))
        .abs()
        .max()
        < 1e-4
    )


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
