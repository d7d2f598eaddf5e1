"""Under load and faults: no request starves, no block is lost, and a fault affects only its own request."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from block_checks import check_engine
from engine_cases import assert_forced, before_forward, counted, generate_all, random_ids, run, tiny

from toolwise.engine import Engine
from toolwise.errors import PolicyError
from toolwise.protocols import Generation, Sampling


async def storm(engine: Any, count: int, seed: int, *, at_once: int = 200) -> list[Any]:
    """Requests of all lengths over a few prefixes, many of them cancelled at random times."""
    drawn = random.Random(seed)
    stems = [random_ids(drawn.randrange(3, 20), i) for i in range(6)]
    gate = asyncio.Semaphore(at_once)

    async def one(i: int) -> Any:
        async with gate:
            ids = [*drawn.choice(stems), *random_ids(drawn.randrange(0, 6), i)]
            kind = drawn.random()
            if kind < 0.1:
                work: Any = engine.score(ids, [random_ids(1 + drawn.randrange(4), i + j) for j in range(2)])
            elif kind < 0.2:
                work = engine.encode(ids)
            else:
                work = engine.generate(ids, Sampling(max_new_tokens=drawn.randrange(1, 20), seed=i))
            asked = asyncio.create_task(work)
            if drawn.random() < 0.3:
                for _ in range(drawn.randrange(30)):
                    await asyncio.sleep(0)
                asked.cancel()
            try:
                return await asked
            except asyncio.CancelledError:
                return None

    return list(await asyncio.gather(*map(one, range(count))))


async def until(so: Callable[[], bool]) -> None:
    while not so():  # noqa: ASYNC110 - another thread brings it about
        await asyncio.sleep(0.001)


def weather(count: int, limit_s: float) -> None:
    engine = counted(tiny("llama"), blocks=30, max_batch_tokens=64, max_requests=24)
    results = run(storm(engine, count, 1), limit_s)
    assert len(results) == count
    assert sum(r is not None for r in results) > count / 2
    metrics = engine.metrics()
    assert metrics["engine/blocks_in_use"] == 0
    assert metrics["engine/evictions"] > 0
    assert metrics["engine/preemptions"] > 0
    assert engine.scheduler.requests == []
    check_engine(engine)


def test_a_storm_of_requests_and_cancellations_loses_no_block() -> None:
    weather(500, 60)


@pytest.mark.long
def test_ten_thousand_requests_and_cancellations_lose_no_block() -> None:
    weather(10_000, 600)


def test_the_one_who_came_first_is_done_first_among_equals() -> None:
    """A cache with room for two: later requests never overtake for long."""
    engine = counted(tiny("llama"), blocks=14, max_batch_tokens=32)
    done: list[int] = []

    async def one(i: int) -> None:
        await engine.generate(random_ids(12, i), Sampling(max_new_tokens=12, seed=i))
        done.append(i)

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, range(20)))

    run(all_of_them())
    assert max(abs(place - i) for place, i in enumerate(done)) <= 4


def test_a_long_request_is_not_starved_by_short_ones_that_keep_coming() -> None:
    engine = counted(tiny("llama"), blocks=30, max_batch_tokens=32, max_requests=4)

    async def ask() -> int:
        long = asyncio.create_task(engine.generate(random_ids(60, 1), Sampling(max_new_tokens=40)))
        served = 0
        while not long.done():
            await asyncio.gather(*(engine.generate(random_ids(8, i), Sampling(max_new_tokens=4)) for i in range(4)))
            served += 4
        return served

    assert 0 < run(ask()) < 400


async def between_steps(engine: Engine, look: Callable[[], Any]) -> Any:
    """What `look` returns between two steps: during one, blocks are reserved for tokens to come."""
    seen: Future[Any] = Future()
    engine.run_between_steps(lambda: seen.set_result(look()))
    return await asyncio.wrap_future(seen)


def test_cancellation_frees_at_once_while_others_go_on() -> None:
    engine = counted(tiny("llama"), blocks=200, block_size=4)

    def blocks() -> tuple[int, list[int]]:
        """All that are in use, and those that each request needs."""
        return engine.blocks.in_use, [engine.blocks.needed(len(r.tokens)) for r in engine.scheduler.requests]

    async def ask() -> tuple[Any, Any]:
        tasks = [
            asyncio.create_task(engine.generate(random_ids(40, i), Sampling(max_new_tokens=350))) for i in range(2)
        ]
        await until(lambda: engine.metrics()["engine/decoded_tokens"] >= 10)
        before = await between_steps(engine, blocks)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        step = engine.steps
        after = await between_steps(engine, blocks)
        await until(lambda: engine.steps >= step + 2)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await until(lambda: not engine.scheduler.requests)
        return before, after

    before, after = run(ask())
    for (in_use, needed), count in ((before, 2), (after, 1)):
        assert len(needed) == count
        assert in_use == pytest.approx(sum(needed), abs=count)
    assert engine.metrics()["engine/blocks_in_use"] == 0


def test_a_request_whose_mask_fails_ends_alone() -> None:
    model = tiny("llama")
    engine = counted(model)

    def fails(sampled: Any) -> Any:
        if len(sampled) == 3:
            raise ValueError("no such rule")

    async def ask() -> list[Any]:
        good = [engine.generate(random_ids(9, i), Sampling(max_new_tokens=8, seed=i)) for i in range(3)]
        bad = engine.generate(random_ids(9, 1), Sampling(max_new_tokens=8), logits_mask=fails)
        return list(await asyncio.gather(*good, bad, return_exceptions=True))

    *good, bad = run(ask())
    assert isinstance(bad, PolicyError)
    assert str(bad) == "the logits mask of a request failed: ValueError: no such rule"
    for i, result in enumerate(good):
        assert isinstance(result, Generation)
        assert len(result.token_ids) == 8
        assert_forced(model, random_ids(9, i), result)
    assert engine.metrics()["engine/blocks_in_use"] == 0


def test_a_request_that_gives_nan_ends_alone_and_spoils_no_block() -> None:
    """Token 5 is broken: only requests that contain it fail, then or later."""
    model = tiny("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    engine = counted(model, blocks=24)
    fine = [[i for i in random_ids(20, seed) if i != 5] for seed in range(4)]
    prompts = [*fine[:2], [1, 2, 5, 3], *fine[2:]]

    def without(sampled: Any) -> Any:
        may = torch.ones(97, dtype=torch.bool)
        may[5] = False
        return may

    async def ask() -> list[Any]:
        work = [engine.generate(p, Sampling(max_new_tokens=6), logits_mask=without) for p in prompts]
        return list(await asyncio.gather(*work, return_exceptions=True))

    for _ in range(3):
        results = run(ask())
        assert [isinstance(r, PolicyError) for r in results] == [False, False, True, False, False]
        assert "NaN" in str(results[2])


def test_a_model_that_fails_is_told_to_those_in_it_and_the_engine_recovers() -> None:
    model = tiny("llama")
    engine = counted(model)

    def fail(ids: Any) -> None:
        raise RuntimeError("out of memory")

    async def ask() -> list[Any]:
        work = [engine.generate(random_ids(9, i), Sampling(max_new_tokens=4)) for i in range(4)]
        return list(await asyncio.gather(*work, return_exceptions=True))

    with before_forward(model, fail):
        failed = run(ask())
    well = run(ask())
    assert {str(f) for f in failed} == {"generation failed: RuntimeError: out of memory"}
    assert all(isinstance(w, Generation) for w in well)
    check_engine(engine)


def test_two_event_loops_in_two_threads_share_an_engine() -> None:
    model = tiny("llama")
    engine = counted(model)
    found: dict[int, Generation] = {}

    def work(i: int) -> None:
        found[i] = generate_all(engine, [random_ids(10, i)], [Sampling(max_new_tokens=10, seed=i)])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for i in range(4):
        assert_forced(model, random_ids(10, i), found[i])


def test_a_loop_that_closed_in_the_middle_leaves_nothing_behind() -> None:
    engine = counted(tiny("llama"))

    async def leave() -> None:
        asyncio.get_running_loop().create_task(engine.generate(random_ids(9, 1), Sampling(max_new_tokens=300)))
        await asyncio.sleep(0.02)

    asyncio.run(leave())
    [after] = generate_all(engine, [random_ids(9, 2)], [Sampling(max_new_tokens=3)])
    assert len(after.token_ids) == 3
    assert engine.metrics()["engine/blocks_in_use"] == 0


def test_the_event_loop_is_free_while_the_model_works() -> None:
    model = tiny("llama")
    engine = counted(model)
    ticks: list[float] = []

    async def ask() -> None:
        task = asyncio.create_task(engine.generate(random_ids(30, 1), Sampling(max_new_tokens=150)))
        while not task.done():
            ticks.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.001)

    run(ask())
    assert len(ticks) > 20
