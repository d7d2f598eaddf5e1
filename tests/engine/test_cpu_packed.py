"""Packed weights: the same products up to rounding, and never those of older weights."""

from __future__ import annotations

import asyncio

import pytest
import torch
from precision import assert_fp32_close
from transformers import LlamaConfig, LlamaForCausalLM

from toolwise.engine import Engine, cpu_packed
from toolwise.engine.cpu_packed import PackedProjections, packing_problem
from toolwise.engine.cpu_runner import CpuRunner
from toolwise.protocols import Generation, Sampling

PROMPT = [5, 9, 13, 2, 40, 41]


def engine_of(seed: int) -> Engine:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=128, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return Engine(LlamaForCausalLM(config).eval())


def generate(engine: Engine) -> Generation:
    return asyncio.run(engine.generate(PROMPT, Sampling(max_new_tokens=12, do_sample=False)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_a_packed_layer_computes_the_layer(bias: bool, rows: int) -> None:
    layer, states = torch.nn.Linear(48, 80, bias=bias), torch.randn(rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(PackedProjections()(layer)(states), layer(states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True, False, True)])
@pytest.mark.parametrize("rows", [1, 300])
def test_layers_of_one_input_are_one_product(biases: tuple[bool, ...], rows: int) -> None:
    states, widths = torch.randn(rows, 48), (80, 16, 16)
    layers = [torch.nn.Linear(48, width, bias=bias) for width, bias in zip(widths, biases, strict=True)]
    with torch.inference_mode():
        joined = PackedProjections()(*layers)(states)
        for part, layer in zip(torch.split(joined, widths, -1), layers, strict=True):
            torch.testing.assert_close(part, layer(states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 300])
def test_a_gated_product_is_the_activation_times_the_other(bias: bool, rows: int) -> None:
    first, second = (torch.nn.Linear(48, 80, bias=bias) for _ in range(2))
    states = torch.randn(rows, 48)
    with torch.inference_mode():
        expected = torch.nn.functional.silu(first(states)) * second(states)
        torch.testing.assert_close(PackedProjections().gated(first, second)(states), expected, rtol=1e-5, atol=1e-5)


def test_an_engine_with_packed_weights_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_packed, "MIN_WEIGHTS", 0)
    plain, packed = engine_of(1), engine_of(1)
    assert isinstance(packed.runner, CpuRunner)
    assert packed.runner.pack_weights()
    first, second = generate(plain), generate(packed)
    assert list(first.token_ids) == list(second.token_ids)
    assert_fp32_close(first.logprobs, second.logprobs)


def test_new_weights_are_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_packed, "MIN_WEIGHTS", 0)
    engine, other = engine_of(1), engine_of(2)
    assert isinstance(engine.runner, CpuRunner)
    engine.runner.pack_weights()
    generate(engine)
    engine.model.load_state_dict(other.model.state_dict())
    engine.weights_changed(1)
    assert_fp32_close(generate(engine).logprobs, generate(other).logprobs)


def test_a_small_model_is_left_as_it_is() -> None:
    engine = engine_of(1)
    assert isinstance(engine.runner, CpuRunner)
    assert not engine.runner.pack_weights()
    assert packing_problem(1 << 50) is not None
