"""The engine's API: stops, one-line errors, masks, counters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from architectures import build
from engine_cases import VOCABULARY, counted, generate_all, random_ids, run, shipped, tiny
from precision import assert_fp32_close

from toolwise.engine import Engine
from toolwise.errors import ContextFullError, ModelError, PolicyError
from toolwise.protocols import Sampling, TokenGenerator


def test_it_is_a_generator_of_tokens() -> None:
    assert isinstance(Engine(tiny("llama"), blocks=8), TokenGenerator)


def test_a_stop_token_ends_a_reply_and_is_part_of_it() -> None:
    engine = counted(tiny("llama"))
    ids = random_ids(9, 1)
    [free] = generate_all(engine, [ids], [Sampling(max_new_tokens=10, seed=5)])
    stop = free.token_ids[4]
    place = list(free.token_ids).index(stop)
    [found] = generate_all(engine, [ids], [Sampling(max_new_tokens=10, seed=5, stop_token_ids=(stop,))])
    assert list(found.token_ids) == list(free.token_ids[: place + 1])
    assert len(found.logprobs) == place + 1
    assert found.finish_reason == "stop"
    assert free.finish_reason == "length"


def test_a_stop_string_ends_a_reply_when_its_last_token_is_there() -> None:
    model, chat = shipped()
    engine = counted(model, decode=chat.decode)
    ids = chat.encode("<|user|>What is 2 + 2?<|end|><|assistant|>")
    [free] = generate_all(engine, [ids], [Sampling(max_new_tokens=24, seed=3, temperature=3.0)])
    text = chat.decode(free.token_ids)
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    [found] = generate_all(
        engine, [ids], [Sampling(max_new_tokens=24, seed=3, temperature=3.0)], stop_strings=["never said", stop]
    )
    assert found.finish_reason == "stop"
    assert list(found.token_ids) == list(free.token_ids[: len(found.token_ids)])
    assert stop in chat.decode(found.token_ids)
    assert stop not in chat.decode(found.token_ids[:-1])


def test_stop_strings_need_somebody_who_reads() -> None:
    with pytest.raises(PolicyError, match=r"decode=tokenizer\.decode"):
        generate_all(counted(tiny("llama")), [[1]], [Sampling()], stop_strings=["x"])


def test_text_that_cannot_be_read_is_that_requests_own_trouble() -> None:
    def decode(ids: Any) -> str:
        raise UnicodeError("no such letter")

    engine = counted(tiny("llama"), decode=decode)

    async def ask() -> list[Any]:
        good = engine.generate([1, 2], Sampling(max_new_tokens=3))
        bad = engine.generate([1, 2, 3], Sampling(max_new_tokens=3), stop_strings=["x"])
        return list(await asyncio.gather(good, bad, return_exceptions=True))

    good, bad = run(ask())
    assert len(good.token_ids) == 3
    assert "cannot be decoded: UnicodeError" in str(bad)


def test_a_mask_keeps_a_reply_to_what_it_allows() -> None:
    engine = counted(tiny("llama"))

    def even_then_odd(sampled: Any) -> torch.Tensor:
        return torch.arange(VOCABULARY) % 2 == len(sampled) % 2

    [found] = generate_all(engine, [[3, 4]], [Sampling(max_new_tokens=12)], logits_mask=even_then_odd)
    assert [t % 2 for t in found.token_ids] == [0, 1] * 6


@pytest.mark.parametrize(
    ("ids", "sampling", "words"),
    [
        ([], Sampling(), "no tokens"),
        ([VOCABULARY], Sampling(), f"outside the model's {VOCABULARY}"),
        ([1], Sampling(max_new_tokens=0), "max_new_tokens must be at least 1"),
        ([1], Sampling(temperature=0.0), "temperature above 0"),
    ],
)
def test_what_would_bring_down_a_batch_is_refused_alone(ids: Any, sampling: Sampling, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        generate_all(counted(tiny("llama")), [ids], [sampling])


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ContextFullError, match="do not fit the model's 512"):
        generate_all(counted(tiny("llama")), [[1] * 500], [Sampling(max_new_tokens=13)])
    with pytest.raises(ContextFullError, match="do not fit the engine's cache of 32"):
        generate_all(counted(tiny("llama"), blocks=8), [[1] * 20], [Sampling(max_new_tokens=13)])


def test_what_just_fits_is_served() -> None:
    engine = counted(tiny("llama"), blocks=8)
    found = generate_all(engine, [[1] * 20, [2] * 20], [Sampling(max_new_tokens=12, seed=i) for i in range(2)])
    assert [len(r.token_ids) for r in found] == [12, 12]


def test_a_score_without_tokens_is_refused() -> None:
    engine = counted(tiny("llama"))
    for prefix, continuation in (([1], []), ([], [1])):
        with pytest.raises(PolicyError, match="need at least one token"):
            run(engine.score(prefix, [continuation]))
    assert run(engine.score([1, 2], [])) == []


def test_a_model_that_attends_otherwise_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match=r'rollout\.engine = "transformers"') as fault:
        Engine(build("bloom"))
    assert "\n" not in str(fault.value)


def test_the_counters_count() -> None:
    engine = counted(tiny("llama"), fused=False)
    generate_all(engine, [random_ids(10, 1)], [Sampling(max_new_tokens=5)])
    assert engine.metrics() == {
        "engine/prefilled_tokens": 10.0,
        "engine/reused_tokens": 0.0,
        "engine/decoded_tokens": 4.0,
        "engine/preemptions": 0.0,
        "engine/evictions": 0.0,
        "engine/blocks_in_use": 0.0,
        "engine/blocks": 256.0,
        "engine/steps": 5.0,
    }


def test_a_group_that_asks_the_same_is_answered_in_one_step() -> None:
    engine = counted(tiny("llama"))
    engine.batch_wait_s = 0.2  # until all requests have arrived
    ids = random_ids(21, 1)
    one = generate_all(engine, [ids] * 4, [Sampling(max_new_tokens=1, seed=n) for n in range(4)])
    assert engine.metrics()["engine/steps"] == 1.0
    assert engine.metrics()["engine/prefilled_tokens"] == 21.0
    alone = [generate_all(counted(tiny("llama")), [ids], [Sampling(max_new_tokens=1, seed=n)])[0] for n in range(4)]
    assert [list(g.token_ids) for g in one] == [list(g.token_ids) for g in alone]


def test_a_mean_is_kept_for_others_only_when_all_of_it_is_computed() -> None:
    engine, greedy = Engine(tiny("llama"), blocks=256, max_batch_tokens=8), Sampling(max_new_tokens=12, do_sample=False)
    few, prompt = random_ids(4, 1), random_ids(15, 3)

    async def mixed() -> Any:
        asked = (engine.generate(few, greedy), engine.generate(few, greedy), engine.encode(prompt, pool="mean"))
        return await asyncio.gather(*asked, engine.generate(prompt, greedy))

    found = run(mixed())[-1]
    [later] = generate_all(engine, [prompt], [greedy])
    [alone] = generate_all(Engine(tiny("llama"), blocks=256), [prompt], [greedy])
    assert list(found.token_ids) == list(later.token_ids) == list(alone.token_ids)
    assert_fp32_close(later.logprobs, alone.logprobs)


def test_means_of_different_prompts_do_not_wait_for_each_other() -> None:
    engine = counted(tiny("llama"))
    engine.batch_wait_s = 0.2  # until all requests have arrived

    async def many() -> Any:
        return await asyncio.gather(*(engine.encode(random_ids(12, n), pool="mean") for n in range(6)))

    run(many())
    assert engine.metrics()["engine/steps"] == 1.0


class Panic(BaseException):
    """Stands for the panic of a Rust extension."""


@pytest.mark.parametrize("fault", [RuntimeError, Panic, KeyboardInterrupt])
def test_who_was_not_in_a_step_that_failed_is_answered(fault: type[BaseException]) -> None:
    engine = counted(tiny("llama"))
    engine.batch_wait_s = 0.2  # until all requests have arrived
    head, calls = engine.results.head, []

    def fails_once(states: torch.Tensor) -> torch.Tensor:
        calls.append(states)
        if len(calls) == 1:
            raise fault("out of memory")
        return head(states)

    engine.results.head = fails_once
    ids = random_ids(20, 1)

    async def group() -> Any:
        asked = (engine.generate([*ids, *more], Sampling(max_new_tokens=3)) for more in ([], [3], [4]))
        return await asyncio.gather(*asked, return_exceptions=True)

    leader, *others = run(group())
    assert "out of memory" in str(leader)
    assert [len(g.token_ids) for g in others] == [3, 3]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_scores_are_the_same_where_results_must_be_so_to_the_bit(prefix_cache: bool) -> None:
    prefix, more = random_ids(16, 1), [random_ids(n, n) for n in (3, 5, 1)]

    def scored(**how: Any) -> list[float]:
        engine = Engine(tiny("llama"), blocks=64, block_size=4, prefix_cache=prefix_cache, **how)
        return [x for s in run(engine.score(prefix, more)) for x in s.logprobs]

    assert_fp32_close(scored(deterministic=True), scored())


def test_dropping_and_rebuilding_the_cache_takes_milliseconds() -> None:
    import time

    engine = Engine(shipped()[0], memory_mb=1024)
    generate_all(engine, [[1, 2, 3]], [Sampling(max_new_tokens=1)])
    began = time.process_time()
    for _ in range(10):
        engine.drop_cache()
        engine.runner.allocate(engine.blocks.count)
    assert (time.process_time() - began) / 10 < 0.1, "a gibibyte"
