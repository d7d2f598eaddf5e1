"""On a GPU: copies of the state while it computes, a real out-of-memory, a cache that gives way, and the estimate."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
import torch
from learner_cases import LR, changed, credit, tiny_model

from toolwise.engine import Engine
from toolwise.learner.actor import Actor
from toolwise.learner.memory_estimate import update_memory
from toolwise.learner.optimizer import Optimizer
from toolwise.protocols import Sampling
from toolwise.training.cache_memory import CacheMemory, CudaMemory
from toolwise.training.checkpoint.snapshot import TensorCopies, freeze

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def mid_model() -> Any:
    """45 million weights; activations are most of an update's memory."""
    return tiny_model(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4096, max_position_embeddings=2048, initializer_range=0.02,
    ).to("cuda", torch.bfloat16)  # fmt: skip


def rollouts(count: int = 32, prompt: int = 200, reply: int = 300) -> list[Any]:
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randrange(2, 4096) for _ in range(length)]

    return [
        credit([(ids(prompt), ids(reply), [-8.0] * reply)], 1.0 if i % 2 else -1.0, name=str(i), group=str(i // 4))
        for i in range(count)
    ]


def test_a_copy_holds_the_values_of_its_moment() -> None:
    state = {"w": torch.zeros(1 << 24, device="cuda"), "m": torch.zeros(3, device="cuda", dtype=torch.bfloat16)}
    copies = TensorCopies()
    for round_number in range(1, 4):
        state["w"].fill_(round_number)  # still running when the state is frozen
        frozen = freeze(state)
        copied = copies.copy(frozen)
        state["w"].fill_(-1.0)
        assert copied["w"].is_pinned()
        assert bool((copied["w"] == round_number).all())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("state", ["fp32", "bf16", "cpu"])
def test_the_estimate_is_within_15_percent(state: Any, checkpointing: bool) -> None:
    settings = changed(
        LR, micro_batch_tokens=8192, optimizer_state=state, activation_checkpointing=checkpointing, lr=1e-5
    )
    actor = Actor(mid_model(), settings)
    batch = rollouts()
    actor.update(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    actor.update(batch)
    predicted = update_memory(actor.model, actor.optimizer, settings.actor, 8192).peak
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15)


def test_state_on_the_cpu_gives_the_same_weights_for_the_same_gradients() -> None:
    """The gradients are given: two passes over a GPU differ in rounding, which AdamW's first steps make large."""
    models = [mid_model()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [
        Optimizer(model.parameters(), changed(LR, lr=1e-4).actor, total_steps=3, state=state)
        for model, state in zip(models, ("fp32", "cpu"), strict=True)
    ]
    generator = torch.Generator("cuda").manual_seed(0)
    for update in range(1, 4):
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            one.grad = torch.randn(one.shape, generator=generator, device="cuda").to(one.dtype)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.accumulate_gradients()
            optimizer.step(update)
    for one, other in zip(*(optimizer.masters for optimizer in optimizers), strict=True):
        assert (other.device.type, one.device.type) == ("cpu", "cuda")
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-7)
    assert all(weight.is_cuda for weight in optimizers[1].weights)


def test_an_update_beside_a_cache_that_takes_nearly_everything() -> None:
    """The allocator really runs out; the cache is freed, taken again, and the engine answers as before."""
    model = mid_model()
    settings = changed(LR, micro_batch_tokens=8192, lr=1e-9)
    expected = Actor(copy.deepcopy(model), settings).update(rollouts())
    actor = Actor(model, settings)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    block_bytes = Engine(model, blocks=1).runner.block_bytes
    engine = Engine(model, blocks=(free - 600_000_000) // block_bytes)
    shared = CacheMemory(engine, CudaMemory(actor.device))
    actor.memory.reclaim = shared.reclaim

    def generate() -> list[int]:
        return list(asyncio.run(engine.generate([5, 6, 7], Sampling(do_sample=False, max_new_tokens=20))).token_ids)

    answer, blocks = generate(), engine.blocks.count
    shared.before_update()
    metrics = actor.update(rollouts())
    assert metrics["actor/out_of_memory"] >= 1.0
    assert shared.after_update()["engine/cache_freed"] == 1.0
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.02)
    engine.weights_changed(1)
    assert generate() == answer
    assert engine.blocks.count < blocks or shared.frees_each_update
    shared.before_update()
    assert actor.update(rollouts())["actor/out_of_memory"] == 0.0
