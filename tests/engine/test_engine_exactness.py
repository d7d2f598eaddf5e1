"""The engine matches transformers token for token, however requests are batched, chunked, shared or preempted."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from engine_cases import (
    FAMILIES,
    assert_forced,
    assert_greedy,
    counted,
    forced,
    generate_all,
    greedily,
    random_ids,
    reference,
    run,
    tiny,
)
from precision import assert_fp32_close
from selection import quick_first

from toolwise.engine import Engine
from toolwise.protocols import Generation, Sampling

NEW = 14
LENGTHS = (1, 3, 4, 5, 17, 30, 30, 9)
PROMPTS = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
PROMPTS[5] = PROMPTS[6][:21] + PROMPTS[5][21:]
WAYS: dict[str, dict[str, Any]] = {
    "all together": {},
    "in chunks": {"max_batch_tokens": 11, "max_requests": 8},
    "two at a time": {"max_requests": 2},
    "short of memory": {"blocks": 16},
    "nothing shared": {"prefix_cache": False},
    "to the bit": {"deterministic": True},
    "large blocks": {"block_size": 32},
    "one by one": {"block_size": 1},
    "stock": {"fused": False},
    "stock, in chunks": {"fused": False, "max_batch_tokens": 11, "max_requests": 8},
    "stock, short of memory": {"fused": False, "blocks": 16},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", quick_first(FAMILIES, ("qwen3",)))
def test_greedy_is_what_transformers_generates(family: str, way: str) -> None:
    model = tiny(family)
    engine = counted(model, **WAYS[way])
    prompts = [*PROMPTS, *PROMPTS[3:]]
    found = generate_all(engine, prompts, [greedily(model, NEW)] * len(prompts))
    expected = {tuple(p): reference(model, p, NEW) for p in PROMPTS}
    for ids, result in zip(prompts, found, strict=True):
        assert_greedy(model, ids, list(result.token_ids), expected[tuple(ids)])
        assert_forced(model, ids, result)
    assert engine.metrics()["engine/blocks_in_use"] == 0
    if "short of memory" in way:
        assert engine.metrics()["engine/preemptions"] > 0
    if way == "nothing shared" or "short of memory" in way:
        return
    assert engine.metrics()["engine/reused_tokens"] > 0


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_logprobs_are_those_of_a_teacher_forced_pass(temperature: float) -> None:
    model = tiny("qwen3")
    samplings = [Sampling(temperature=temperature, max_new_tokens=20, seed=i) for i in range(len(PROMPTS))]
    for ids, result in zip(PROMPTS, generate_all(counted(model), PROMPTS, samplings), strict=True):
        assert_forced(model, ids, result, temperature)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_draw_does_not_depend_on_its_company(deterministic: bool) -> None:
    """Deterministic: equal to the last bit; otherwise up to rounding, which changes no sample here."""
    model = tiny("llama")
    samplings = [Sampling(temperature=1.5, max_new_tokens=12, seed=i) for i in range(len(PROMPTS))]

    def company(**settings: Any) -> list[Generation]:
        return generate_all(counted(model, deterministic=deterministic, **settings), PROMPTS, samplings)

    pairs = zip(PROMPTS, samplings, strict=True)
    alone = [generate_all(counted(model, deterministic=deterministic), [p], [s])[0] for p, s in pairs]
    for together in (company(), company(max_requests=3), company(blocks=16), company(prefix_cache=False)):
        for one, other in zip(alone, together, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            if deterministic:
                assert list(one.logprobs) == list(other.logprobs), "to the bit"


def test_deterministic_results_are_the_same_to_the_bit_on_the_model_that_ships() -> None:
    model = tiny("builtin")
    prompts = [random_ids(5 + 9 * i, i) for i in range(6)]
    samplings = [Sampling(max_new_tokens=6 + i, seed=i) for i in range(6)]
    together = generate_all(counted(model, deterministic=True), prompts, samplings)
    pressed = generate_all(counted(model, deterministic=True, blocks=18), prompts, samplings)
    for i, result in enumerate(together):
        [alone] = generate_all(counted(model, deterministic=True), [prompts[i]], [samplings[i]])
        for other in (alone, pressed[i]):
            assert list(other.token_ids) == list(result.token_ids)
            assert list(other.logprobs) == list(result.logprobs)


def test_greedy_after_an_update_is_the_new_models() -> None:
    model, other = tiny("llama"), tiny("llama", seed=1)
    engine = counted(model)
    ids, greedy = PROMPTS[4], Sampling(max_new_tokens=NEW, do_sample=False)
    before = generate_all(engine, [ids], [greedy])[0]
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    engine.weights_changed(1)
    after = generate_all(engine, [ids], [greedy])[0]
    assert list(after.token_ids) != list(before.token_ids)
    assert_greedy(other, ids, list(after.token_ids), reference(other, ids, NEW))
    assert_forced(other, ids, after)
    assert (before.policy_version, after.policy_version) == (0, 1)
    assert after.token_versions is None


def test_weights_that_changed_without_a_word_are_noticed() -> None:
    model = tiny("llama")
    engine = counted(model)
    ids, greedy = PROMPTS[5], Sampling(max_new_tokens=NEW, do_sample=False)
    generate_all(engine, [ids], [greedy])
    with torch.no_grad():
        model.get_decoder().layers[0].mlp.up_proj.weight.mul_(-1)
    found = generate_all(engine, [ids], [greedy])[0]
    assert_greedy(model, ids, list(found.token_ids), reference(model, ids, NEW))
    assert engine.metrics()["engine/reused_tokens"] == 0


def test_a_cache_that_is_kept_is_not_used_for_new_prompts() -> None:
    model = tiny("llama")
    engine = counted(model)
    ids = PROMPTS[5]
    generate_all(engine, [ids], [Sampling(max_new_tokens=1)])
    with torch.no_grad():
        model.get_decoder().layers[0].mlp.up_proj.weight.mul_(1.001)
    engine.weights_changed(1, keep_cache=True)
    generate_all(engine, [ids], [Sampling(max_new_tokens=1)])
    assert engine.metrics()["engine/reused_tokens"] == 0


def test_a_change_on_the_way_is_stamped_on_every_token_and_computed_anew() -> None:
    """The tokens after the change come from the new model, given those before it."""
    model, other = tiny("llama"), tiny("llama", seed=1)
    engine = counted(model, fused=False)  # one token per step
    ids, new = PROMPTS[4], 40
    step, changed_after = engine.step, 12

    def stepping() -> None:
        step()
        if engine.steps == changed_after:
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                    mine.copy_(theirs)
            engine.weights_changed(7)

    engine.step = stepping  # type: ignore[method-assign]
    [found] = generate_all(engine, [ids], [Sampling(max_new_tokens=new, do_sample=False)])
    versions = list(found.token_versions or ())
    assert versions == [0] * changed_after + [7] * (new - changed_after)
    assert found.policy_version == 0
    kept = list(found.token_ids[:changed_after])
    assert_greedy(other, [*ids, *kept], list(found.token_ids[changed_after:]), reference(other, [*ids, *kept], 28))


def test_every_token_of_ten_turns_is_computed_once() -> None:
    """Only new tokens are prefilled: what earlier turns saw and sampled is never recomputed."""
    model = tiny("qwen2")
    engine = counted(model, blocks=400)

    async def episode() -> tuple[int, int, int]:
        talk, sampled, said = random_ids(30, 1), 0, 30
        for turn in range(10):
            found = await engine.generate(talk, Sampling(max_new_tokens=9, seed=turn))
            assert_forced(model, talk, found)
            news = random_ids(5 + turn, 100 + turn)
            talk = [*talk, *found.token_ids, *news]
            sampled, said = sampled + 9, said + len(news)
        return len(talk) - len(news), sampled, said - len(news)

    length, sampled, said = run(episode())
    metrics = engine.metrics()
    # The last token of a turn is not computed when it is sampled, so it is new to the next turn.
    assert metrics["engine/prefilled_tokens"] == said + 9
    assert metrics["engine/decoded_tokens"] == sampled - 10
    assert metrics["engine/prefilled_tokens"] + metrics["engine/decoded_tokens"] == length - 1


def test_a_group_computes_its_prompt_once() -> None:
    model = tiny("llama")
    engine = counted(model)
    engine.batch_wait_s = 0.1  # all have arrived before it starts, however busy the machine
    ids = random_ids(23, 5)
    found = generate_all(engine, [ids] * 8, [Sampling(max_new_tokens=5, seed=i, temperature=2.0) for i in range(8)])
    assert engine.metrics()["engine/prefilled_tokens"] == len(ids)
    assert len({tuple(r.token_ids) for r in found}) > 1
    for result in found:
        assert_forced(model, ids, result, 2.0)


@pytest.mark.parametrize("count", [1, 5])
def test_scores_are_those_of_a_teacher_forced_pass(count: int) -> None:
    model = tiny("qwen3")
    engine = counted(model, max_batch_tokens=16)
    prefix = random_ids(21, 3)
    continuations = [random_ids(1 + 4 * i, 50 + i) for i in range(count)]
    found = run(engine.score(prefix, continuations, temperature=0.7))
    for tokens, scored in zip(continuations, found, strict=True):
        logprobs = forced(model, prefix, tokens, 0.7)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        assert_fp32_close(scored.logprobs, logprobs[range(len(tokens)), tokens])
        assert_fp32_close(scored.entropies, entropies, scale=math.log(model.config.vocab_size))
    own = sum(len(tokens) - 1 for tokens in continuations)
    assert engine.metrics()["engine/prefilled_tokens"] == len(prefix) + own, "the prefix once, and no last token"


def test_scores_survive_being_put_off() -> None:
    model = tiny("llama")
    engine = counted(model, blocks=12, max_batch_tokens=8)
    prefix = random_ids(10, 3)
    continuations = [random_ids(12, 50 + i) for i in range(6)]
    found = run(engine.score(prefix, continuations))
    for tokens, scored in zip(continuations, found, strict=True):
        expected = forced(model, prefix, tokens)[range(12), tokens]
        assert_fp32_close(scored.logprobs, expected)


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_encoding_is_the_trunks_hidden_state_and_is_not_computed_again(pool: Any) -> None:
    model = tiny("llama")
    engine = counted(model, max_batch_tokens=8)
    ids = random_ids(22, 9)

    async def ask() -> tuple[torch.Tensor, Generation]:
        state = await engine.encode(ids, pool=pool)
        return state, await engine.generate(ids, Sampling(max_new_tokens=3, do_sample=False))

    state, reply = run(ask())
    with torch.inference_mode():
        states = model.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state[0]
    assert_fp32_close(state, states[-1] if pool == "last" else states.mean(0), scale=float(states.abs().max()))
    assert state.dtype == torch.float32
    again = 1 if pool == "mean" else 0
    assert engine.metrics()["engine/prefilled_tokens"] == len(ids) + again
    assert_greedy(model, ids, list(reply.token_ids), reference(model, ids, 3))


def test_the_cache_can_be_dropped_and_comes_again() -> None:
    model = tiny("llama")
    engine = counted(model)
    ids, greedy = PROMPTS[5], Sampling(max_new_tokens=4, do_sample=False)
    before = generate_all(engine, [ids], [greedy])[0]
    engine.drop_cache()
    assert engine.runner.keys == []
    after = generate_all(engine, [ids], [greedy])[0]
    assert list(before.token_ids) == list(after.token_ids)
    assert engine.metrics()["engine/reused_tokens"] == 0


def test_thinking_alternatives_generate_and_score_side_by_side() -> None:
    """All three kinds of request at once, over prefixes of one another."""
    model = tiny("qwen2")
    engine = counted(model, max_batch_tokens=24, blocks=40)
    ids = random_ids(26, 2)

    async def ask(engine: Engine) -> Any:
        return await asyncio.gather(
            engine.generate(ids, Sampling(max_new_tokens=6, do_sample=False)),
            engine.generate(ids[:15], Sampling(max_new_tokens=6, do_sample=False)),
            engine.score(ids[:15], [ids[15:20], ids[15:26], [1, 2]]),
            engine.encode(ids[:20]),
        )

    whole, short, scored, _ = run(ask(engine))
    assert_greedy(model, ids, list(whole.token_ids), reference(model, ids, 6))
    assert_greedy(model, ids[:15], list(short.token_ids), reference(model, ids[:15], 6))
    for tokens, found in zip([ids[15:20], ids[15:26], [1, 2]], scored, strict=True):
        expected = forced(model, ids[:15], tokens)[range(len(tokens)), tokens]
        assert_fp32_close(found.logprobs, expected)
