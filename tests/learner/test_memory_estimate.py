"""The memory estimate against what autograd really keeps. `benchmarks/memory.py` compares it with a GPU's peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from learner_cases import LR, changed, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from toolwise.learner import fused_modules
from toolwise.learner.actor import Actor
from toolwise.learner.forward import hidden_states
from toolwise.learner.memory_estimate import ModelShape, permanent_parts, snapshot_bytes, update_memory
from toolwise.learner.optimizer import Optimizer
from toolwise.learner.packing import Packed, micro_batches
from toolwise.training.checkpoint import tensor_bytes

torch.set_num_threads(1)


class Row:
    def __init__(self, length: int) -> None:
        self.ids = list(range(length))
        self.sampled = [False] + [True] * (length - 1)


@contextmanager
def kept_bytes(model: Any) -> Iterator[list[int]]:
    """Bytes of the distinct memory that autograd saves for the backward pass, besides weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    total: list[int] = []
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            alive.append(tensor)  # else its address could be used again
            saved[storage.data_ptr()] = max(saved.get(storage.data_ptr(), 0), tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(saved.values()))


def one_row(tokens: int) -> Packed:
    [packed] = micro_batches([Row(tokens + 1)], 10_000)
    return packed


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_keeps(
    heads: tuple[int, int], checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the modules that a GPU runs, computed by their torch references."""
    monkeypatch.setattr(fused_modules, "available", lambda device: True)
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "num_hidden_layers": 6}
    model = tiny_model(hidden_size=64, intermediate_size=160, vocab_size=512, max_position_embeddings=512, **shape)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kept = []
    for tokens in (100, 300):
        with kept_bytes(model) as total:
            hidden_states(model, one_row(tokens))
        kept.append(total[0])
    per_token = (kept[1] - kept[0]) / 200
    sizes = ModelShape.of(model)
    layers = sizes.layers * (sizes.item_bytes * sizes.width if checkpointing else sizes.layer_bytes())
    ends = sizes.item_bytes * (sizes.width + (0 if checkpointing else 2 * sizes.head_size))  # the rest is not saved
    # What only a CPU keeps: the scaled input of each norm, and the attention's output as the kernel lays it out.
    copies = sizes.width if checkpointing else sizes.layers * (2 * sizes.width + sizes.query_width) + sizes.width
    assert per_token == pytest.approx(layers + ends + sizes.item_bytes * copies, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["fp32", "bf16", "cpu"])
def test_weights_masters_and_moments_are_counted_to_the_byte(state: Any, dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    actor = Actor(model, changed(LR, optimizer_state=state))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    actor.optimizer.accumulate_gradients()
    actor.optimizer.step(1)
    parts = permanent_parts(model, actor.optimizer)
    moments = sum(s[n].nbytes for s in actor.optimizer.adamw.state.values() for n in ("exp_avg", "exp_avg_sq"))
    masters = sum(m.nbytes for w, m in zip(actor.optimizer.weights, actor.optimizer.masters, strict=True) if m is not w)
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert parts.get("optimizer states", 0) == (0 if state == "cpu" else moments)
    assert parts.get("fp32 master weights", 0) == (0 if state == "cpu" else masters)
    counters = 4 * len(actor.optimizer.weights)
    saved = tensor_bytes([actor.weights_to_save(), actor.state_dict()])
    assert snapshot_bytes(model, actor.optimizer) == saved - counters


def test_a_model_of_1_6_billion_weights_on_paper() -> None:
    """Worked by hand: 1.61e9 trained weights in bf16, micro-batches of 32,768 tokens."""
    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, num_key_value_heads=32,
        intermediate_size=8192, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = 49152 * 2048 + 24 * (4 * 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048) + 2048
    assert weights == sum(parameter.numel() for parameter in model.parameters())
    actor = changed(LR, micro_batch_tokens=32_768).actor
    found = update_memory(model, Optimizer(model.parameters(), actor, total_steps=1), actor)
    assert found.permanent == {
        "weights": 2 * weights,
        "fp32 master weights": 4 * weights,
        "optimizer states": 8 * weights,
    }
    assert found.gradients == 4 * weights
    per_layer = 2 * (4 * 2048 + 2 * 2048 + 2 * 2048 + 3 * 8192) + 4 * 32 + 8
    per_token = 24 * per_layer + 2 * (3 * 2048 + 2 * 64) + 2 * (3 * 8192 + 2 * 2048)
    assert found.activations == 32_768 * per_token
    assert found.logits == 2 * 2 * 49152 * ((1 << 29) // (2 * 49152) + 2048)
    assert found.peak == sum(found.parts().values())
    assert 95e9 < found.peak < 102e9
    less = update_memory(
        model,
        Optimizer(model.parameters(), actor, total_steps=1),
        changed(LR, activation_checkpointing=True, micro_batch_tokens=32_768).actor,
    )
    assert less.activations < 0.15 * found.activations
