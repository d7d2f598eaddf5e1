"""Decoding in windows gives the same results as the stock runner as requests come, go, stop or outgrow a window."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_cases import (
    assert_forced,
    assert_greedy,
    counted,
    generate_all,
    greedily,
    random_ids,
    reference,
    run,
    tiny,
)
from precision import assert_fp32_close
from selection import quick_first

from toolwise.engine import Engine, cpu_runner
from toolwise.engine.blocks import Lease
from toolwise.engine.cpu_runner import CpuRunner
from toolwise.engine.kv_windows import KVWindows, bucket_width
from toolwise.engine.request import Request
from toolwise.protocols import Sampling

NEW = 90
PROMPTS = [random_ids(length, seed) for seed, length in enumerate((1, 17, 30, 9, 64, 120, 31))]


def windows(model: Any, **settings: Any) -> Any:
    engine = counted(model, **settings)
    assert isinstance(engine.runner, CpuRunner)
    return engine


async def decoded(engine: Any, tokens: int) -> None:
    while engine.metrics()["engine/decoded_tokens"] < tokens:  # noqa: ASYNC110  # it is another thread that counts
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("family", quick_first(["llama", "qwen2", "qwen3"], ["qwen3"]))
def test_requests_of_many_lengths_outgrow_their_windows(family: str) -> None:
    model = tiny(family)
    engine = windows(model, blocks=400)
    found = generate_all(engine, PROMPTS, [greedily(model, NEW)] * len(PROMPTS))
    for ids, result in zip(PROMPTS, found, strict=True):
        assert_greedy(model, ids, list(result.token_ids), reference(model, ids, NEW))
        assert_forced(model, ids, result)
    assert engine.metrics()["engine/steps"] < NEW / 4
    assert engine.metrics()["engine/blocks_in_use"] == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_prompts_are_read_as_by_the_stock_forward(family: str) -> None:
    model = tiny(family)
    ours, stock = windows(model, blocks=400), counted(model, blocks=400, fused=False)
    assert not isinstance(stock.runner, CpuRunner)
    for ids in PROMPTS:
        found, expected = (run(engine.encode(ids)) for engine in (ours, stock))
        assert_fp32_close(found, expected, scale=float(expected.abs().max()))


def test_a_single_prompt_need_not_wait_for_others() -> None:
    engine = windows(tiny(), blocks=400)
    engine.batch_wait_s = 60.0
    assert run(engine.encode(PROMPTS[1], wait=False)).shape == (engine.model.config.hidden_size,)


def test_prompts_that_fill_a_step_wait_for_no_others() -> None:
    engine = Engine(tiny(), blocks=400, max_batch_tokens=len(PROMPTS[1]))
    engine.batch_wait_s = 60.0
    found = run(asyncio.wait_for(engine.encode(PROMPTS[1]), 30))
    assert found.shape == (engine.model.config.hidden_size,)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("min_rows", [1, 100])
def test_draws_are_those_of_the_stock_way(family: str, min_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_runner, "MIN_BATCHED_ROWS", min_rows)  # attention by two products, or in one call
    model = tiny(family)
    samplings = [Sampling(max_new_tokens=20 + i, temperature=0.7 + 0.1 * i, seed=i) for i in range(len(PROMPTS))]
    ways = [generate_all(counted(model, fused=fused), PROMPTS, samplings) for fused in (None, False)]
    for ours, stock in zip(*ways, strict=True):
        assert ours.token_ids == stock.token_ids
        assert_fp32_close(ours.logprobs, stock.logprobs)


def test_each_ends_at_its_own_stop_token() -> None:
    model = tiny()
    whole = [reference(model, ids, NEW) for ids in PROMPTS]
    samplings = [
        Sampling(max_new_tokens=NEW, do_sample=False, stop_token_ids=(said[5 * place + 3],))
        for place, said in enumerate(whole)
    ]
    found = generate_all(windows(model), PROMPTS, samplings)
    for said, sampling, result in zip(whole, samplings, found, strict=True):
        assert list(result.token_ids) == said[: said.index(sampling.stop_token_ids[0]) + 1]
        assert result.finish_reason == "stop"


def test_who_comes_late_is_taken_in_and_changes_nothing() -> None:
    model = tiny()
    engine = windows(model)

    async def ask() -> list[Any]:
        early = [asyncio.ensure_future(engine.generate(ids, greedily(model, 200))) for ids in PROMPTS[:3]]
        await decoded(engine, 20)
        late = await engine.generate(PROMPTS[3], greedily(model, 5))
        assert not all(task.done() for task in early), "the late one need not wait for the others"
        return [*await asyncio.gather(*early), late]

    for ids, result, new in zip(PROMPTS, run(ask()), (200, 200, 200, 5), strict=False):
        assert_greedy(model, ids, list(result.token_ids), reference(model, ids, new))


def test_a_later_turn_finds_in_blocks_what_windows_computed() -> None:
    model = tiny()
    engine = windows(model)
    [first] = generate_all(engine, PROMPTS[2:3], [greedily(model, 40)])
    longer = [*PROMPTS[2], *first.token_ids, *random_ids(6, 77)]
    before = engine.metrics()
    [second] = generate_all(engine, [longer], [greedily(model, 10)])
    assert engine.metrics()["engine/prefilled_tokens"] - before["engine/prefilled_tokens"] == 7
    assert_greedy(model, longer, list(second.token_ids), reference(model, longer, 10))


def test_other_weights_are_seen_in_the_midst_of_it() -> None:
    """Keys and values of the old weights in windows must not be used with the new ones."""
    model = tiny(seed=5)
    engine = windows(model)

    async def ask() -> Any:
        task = asyncio.ensure_future(engine.generate(PROMPTS[1], greedily(model, 300)))
        await decoded(engine, 10)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        engine.weights_changed(1)
        return await task

    result = run(ask())
    assert result.token_versions is not None
    changed = list(result.token_versions).index(1)
    ids, rest = [*PROMPTS[1], *result.token_ids[:changed]], list(result.token_ids[changed:])
    assert_greedy(model, ids, rest, reference(model, ids, len(rest)))


def test_without_memory_for_windows_everything_goes_the_stock_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_runner, "MAX_WINDOW_BYTES", 1000)
    model = tiny()
    engine = windows(model)
    [found] = generate_all(engine, PROMPTS[:1], [greedily(model, 12)])
    assert_greedy(model, PROMPTS[0], list(found.token_ids), reference(model, PROMPTS[0], 12))
    assert engine.metrics()["engine/steps"] >= 12


def seats(*leases: Lease) -> list[Request]:
    return [Request("generate", [], 0, Sampling(), None, None, lease=lease) for lease in leases]  # type: ignore[arg-type]


def test_whoever_has_a_window_keeps_it() -> None:
    kv_windows = KVWindows.of(64, [torch.zeros(4, 64, 1, 8)])
    a, b, c, d = (Lease(held=i) for i in range(4))
    assert [r.lease for r in kv_windows.assign_rows(seats(a, b, c))] == [a, b, c]
    kv_windows.filled = [5, 6, 7, 0]
    kept = kv_windows.assign_rows(seats(d, c, b))
    assert [r.lease for r in kept] == [d, b, c]
    assert kv_windows.filled[:3] == [0, 6, 7]
    assert [r.lease for r in kv_windows.assign_rows(seats(c))] == [c], "the only one moves to the front"
    assert kv_windows.filled[0] == 0


def test_widths_grow_by_a_quarter() -> None:
    widths = sorted({bucket_width(tokens) for tokens in range(1, 5000)})
    assert widths[0] == 64
    assert all(width % 16 == 0 for width in widths)
    assert all(b <= 1.5 * a for a, b in pairwise(widths))
    assert all(bucket_width(tokens) >= tokens for tokens in range(1, 5000))
