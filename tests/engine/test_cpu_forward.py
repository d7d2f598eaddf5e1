"""The lean CPU forward equals the stock forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import random_ids, tiny
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import CohereConfig, CohereForCausalLM

from toolwise.engine.cpu_forward import CpuForward, cpu_forward_problem, ropes_per_step
from toolwise.models.decoder_layers import describe_decoder

ROWS, LENGTH = 3, 11


@pytest.mark.parametrize("family", ["llama", "llama-rope", "qwen2", "qwen3", "builtin"])
@torch.inference_mode()
def test_token_by_token_it_gives_what_the_stock_forward_gives(family: str) -> None:
    model = tiny(family)
    assert cpu_forward_problem(model) is None
    trunk = model.get_decoder()
    ids = torch.tensor([random_ids(LENGTH, seed) for seed in range(ROWS)])
    past: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        new = key[:, :, None], value[:, :, None]
        past[layer] = tuple(torch.cat(pair, 2) for pair in zip(past[layer], new, strict=True)) if layer in past else new
        out = scaled_dot_product_attention(query[:, :, None], *past[layer], scale=scale, enable_gqa=True)
        return out.reshape(ROWS, -1)

    decoder = describe_decoder(model)
    lean, ropes = CpuForward(decoder), ropes_per_step(decoder, np.zeros(ROWS, dtype=np.int64), LENGTH)
    found = torch.stack([lean.forward(ids[:, at], ropes[at], attend) for at in range(LENGTH)], 1)
    torch.testing.assert_close(found, trunk(input_ids=ids).last_hidden_state, atol=2e-5, rtol=1e-4)


def test_positions_differ_from_row_to_row() -> None:
    model = tiny()
    trunk = model.get_decoder()
    [first, _] = ropes_per_step(describe_decoder(model), np.array([3, 7]), 2)
    cos, sin = first["default"]
    expected = trunk.rotary_emb(trunk.embed_tokens.weight, torch.tensor([[3, 7]]))
    torch.testing.assert_close(cos[:, 0], expected[0][0])
    torch.testing.assert_close(sin[:, 0].abs(), expected[1][0].abs())


def other(kind: str) -> Any:
    if kind == "another family":
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return CohereForCausalLM(CohereConfig(vocab_size=50, num_key_value_heads=1, **shape))
    if kind == "another formula":
        model = tiny()
        layer = model.get_decoder().layers[1]
        layer.forward = lambda states, *args, **more: type(layer).forward(layer, states * 1.01, *args, **more)
        return model
    if kind == "another parameter":
        model = tiny()
        model.get_decoder().layers[1].gate = torch.nn.Parameter(torch.zeros(1))
        return model
    if kind == "half precision":
        return tiny().bfloat16()
    if kind == "a rope that changes with the length":
        return tiny(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    model = tiny()
    attention = model.get_decoder().layers[1].self_attn
    attention.q_proj = type("Adapted", (torch.nn.Linear,), {})(32, 32, bias=False)
    return model


@pytest.mark.parametrize(
    "kind",
    [
        "another family",
        "another formula",
        "another parameter",
        "half precision",
        "a rope that changes with the length",
        "a projection of another kind",
    ],
)
def test_other_models_go_the_stock_way(kind: str) -> None:
    assert cpu_forward_problem(tiny()) is None
    model = other(kind)
    assert cpu_forward_problem(model) is not None
    assert "\n" not in (cpu_forward_problem(model) or "")


def test_any_activation_will_do() -> None:
    assert cpu_forward_problem(tiny(hidden_act="gelu")) is None
