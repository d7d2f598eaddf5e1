"""The prompt of a single request, read without grouping: the same states and cache as the general path."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from engine_cases import tiny

from toolwise.engine import Engine
from toolwise.engine.cpu_prefill import MAX_NEW_TOKENS, fits_prefill, read_tokens
from toolwise.engine.cpu_runner import CpuRunner
from toolwise.protocols import Sampling

PROMPT = [5, 9, 20, 31, 7, 7, 12, 90, 41, 8, 3, 66, 15, 20, 19, 18, 17, 30, 4, 6]


def read(engine: Engine, *prompts: list[int], **options: Any) -> list[torch.Tensor]:
    async def read_each() -> list[torch.Tensor]:
        return [await engine.encode(prompt, **options) for prompt in prompts]

    return asyncio.run(read_each())


@pytest.mark.parametrize("wait", [True, False])
def test_states_equal_those_of_the_stock_forward_with_and_without_a_cached_prefix(wait: bool) -> None:
    model = tiny()
    prompts = [PROMPT, [*PROMPT[:17], 44, 45], [*PROMPT, 50], PROMPT[:1]]
    fast, stock = Engine(model), Engine(model, fused=False)
    assert isinstance(fast.runner, CpuRunner)
    for ours, theirs in zip(read(fast, *prompts, wait=wait), read(stock, *prompts), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert fast.scheduler.reused_tokens > 30


def test_a_prompt_read_alone_is_continued_like_any_other() -> None:
    model = tiny()
    fast, stock = Engine(model), Engine(model, fused=False)
    read(fast, PROMPT, wait=False)
    sampling = Sampling(max_new_tokens=12, do_sample=False)
    replies = [asyncio.run(engine.generate(PROMPT, sampling)).token_ids for engine in (fast, stock)]
    assert replies[0] == replies[1]


def test_a_brief_prompt_is_read_in_the_callers_thread_and_others_are_not() -> None:
    model = tiny()
    engine, threads = Engine(model), []
    run = engine.runner.run
    engine.runner.run = lambda *args: threads.append(threading.current_thread()) or run(*args)  # type: ignore[method-assign]
    read(engine, PROMPT, wait=False)
    read(engine, PROMPT[::-1])
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


def test_changed_weights_are_noticed_by_a_brief_prompt() -> None:
    model = tiny()
    engine = Engine(model)
    [before] = read(engine, PROMPT, wait=False)
    weight = model.get_decoder().layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight.mul_(1.5)
    try:
        [after] = read(engine, PROMPT, wait=False)
        [expected] = read(Engine(model, fused=False), PROMPT)
    finally:
        with torch.no_grad():
            weight.div_(1.5)
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, expected, atol=2e-5, rtol=1e-4)


def test_many_brief_prompts_at_once_share_the_engine() -> None:
    model = tiny()
    engine = Engine(model)

    async def read_all() -> list[torch.Tensor]:
        return list(await asyncio.gather(*(engine.encode([*PROMPT, i], wait=False) for i in range(8))))

    together = asyncio.run(read_all())
    alone = read(Engine(model, fused=False), *([*PROMPT, i] for i in range(8)))
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_long_prompts_are_left_to_the_general_path() -> None:
    assert fits_prefill(0, MAX_NEW_TOKENS)
    assert not fits_prefill(0, MAX_NEW_TOKENS + 1)
    assert not fits_prefill(2000, 3)


def test_states_of_the_last_tokens_are_those_of_a_pass_over_all_of_them() -> None:
    """The last layer computes nothing else for tokens whose state nobody needs."""
    engine = Engine(tiny())
    runner = engine.runner
    assert isinstance(runner, CpuRunner)
    assert runner.decoder is not None
    runner.allocate(8)
    assert runner._cache is not None
    end = len(PROMPT)
    with torch.inference_mode():
        states, caches = [], []
        for first in (3, end - 4, end - 1):
            for start, shown in ((0, 3), (3, first)):  # the first three tokens come from the cache
                tokens = PROMPT[: start + 3] if start == 0 else PROMPT
                result = read_tokens(
                    runner.decoder,
                    runner._parameters,
                    runner._cache,
                    [1, 2],
                    tokens,
                    start,
                    runner.heads,
                    first=min(shown, len(tokens) - 1),
                )
            states.append(result)
            caches.append(runner._cache.clone())
    assert [len(s) for s in states] == [end - 3, 4, 1]
    for some, cache in zip(states, caches, strict=True):
        torch.testing.assert_close(some, states[0][-len(some) :], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cache, caches[0], atol=1e-5, rtol=1e-5)
