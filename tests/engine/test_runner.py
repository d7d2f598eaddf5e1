"""One row for all requests: positions by depth, slots by block table, and only the needed hidden states."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_cases import random_ids, tiny

from toolwise.engine.blocks import BlockManager
from toolwise.engine.request import Request
from toolwise.engine.runner import Runner
from toolwise.engine.scheduler import Scheduler
from toolwise.errors import ModelError
from toolwise.protocols import Sampling

LOOP: Any = asyncio.new_event_loop()
LOOP.close()


def request(tokens: list[int], kind: Any = "generate", **more: Any) -> Request:
    return Request(kind, tokens, len(tokens), Sampling(), asyncio.Future(loop=LOOP), LOOP, **more)


def made(family: str = "llama", **more: Any) -> tuple[Any, Runner, Scheduler]:
    model = tiny(family)
    runner = Runner(model, 4, **more)
    runner.allocate(32)
    return model, runner, Scheduler(BlockManager(32, 4), max_batch_tokens=64, max_requests=8)


def test_a_batch_is_one_row_with_each_token_in_its_place() -> None:
    _, runner, scheduler = made()
    lengths = (6, 3, 1)
    for i, length in enumerate(lengths):
        scheduler.add(request(random_ids(length, i)))
    plan = scheduler.schedule()
    inputs, rows = runner.prepare(plan, scheduler.chunks)
    assert inputs is not None
    assert inputs.ids.shape == (1, 10)
    assert inputs.positions[0].tolist() == [0, *range(3), *range(6)], "the shortest first"
    assert len(set(inputs.context.slots.tolist())) == 10
    assert inputs.output_rows.tolist() == [0, 3, 9]
    assert {len(r.tokens): places for r, places in rows.items()} == {1: [0], 3: [1], 6: [2]}


def test_hidden_states_are_the_models_own() -> None:
    model, runner, scheduler = made("qwen3")
    prompts = [random_ids(length, length) for length in (9, 2, 5)]
    for ids in prompts:
        scheduler.add(request(ids))
    plan = scheduler.schedule()
    states, rows = runner.run(plan, scheduler.chunks)
    for r in plan:
        with torch.inference_mode():
            expected = model.get_decoder()(input_ids=torch.tensor([r.tokens])).last_hidden_state[0, -1]
        torch.testing.assert_close(states[rows[r][0]], expected, atol=1e-5, rtol=1e-4)


def test_a_mean_wants_every_state_and_a_score_those_from_its_prefix_on() -> None:
    _, runner, scheduler = made()
    mean = request(random_ids(5, 1), "read", mean=True)
    scored = request(random_ids(7, 2), "score", targets=(1, 2, 3))
    scored.prompt_length = 5
    for r in (mean, scored):
        scheduler.add(r)
    _, rows = runner.prepare(scheduler.schedule(), scheduler.chunks)
    assert len(rows[mean]) == 5
    assert len(rows[scored]) == 3


def test_copies_happen_all_at_the_same_time() -> None:
    _, runner, _ = made()
    for block in range(4):
        for cached in (*runner.keys, *runner.values):
            cached[block] = block
    runner.copy({1: 0, 2: 1, 3: 2})
    assert [int(runner.keys[1][block].flatten()[0]) for block in range(4)] == [0, 0, 1, 2]


def test_the_cache_has_zeros_and_a_shape_that_kernels_know() -> None:
    _, runner, _ = made()
    assert runner.keys[0].shape == (32, 4, 2, 8)
    assert len(runner.keys) == len(runner.values) == 2
    assert float(runner.keys[0].abs().sum()) == 0.0
    assert runner.blocks_for(1) == (1 << 20) // (2 * 2 * 4 * 2 * 8 * 4)
    assert runner.blocks_for(None) > 0
    runner.release()
    assert runner.keys == []


def test_rows_are_padded_to_a_fixed_number() -> None:
    _, runner, scheduler = made(fixed_rows=16)
    scheduler.add(request(random_ids(5, 1)))
    inputs, _ = runner.prepare(scheduler.schedule(), scheduler.chunks)
    assert inputs is not None
    assert inputs.ids.shape == (1, 16)
    assert len(inputs.context.slots) == 5


def test_a_model_that_does_not_ask_is_not_believed() -> None:
    model, runner, scheduler = made()
    scheduler.add(request(random_ids(5, 1)))
    plan = scheduler.schedule()
    runner.layers += 1
    with pytest.raises(ModelError, match="2 of 3 layers attended"):
        runner.run(plan, scheduler.chunks)
    assert model.config._attn_implementation != "toolwise_paged"
