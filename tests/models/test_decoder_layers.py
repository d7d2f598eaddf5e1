"""A decoder layer is described from its modules; what the description would leave out is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import LONG, build
from torch.nn.functional import silu

from toolwise.models.decoder_layers import (
    UndescribedError,
    describe_decoder,
    gelu_tanh,
    longrope_limit,
    max_context,
    rms_norm_of,
)


def test_a_gemma_has_norms_around_its_parts_and_two_ropes() -> None:
    decoder = describe_decoder(build("gemma3"))
    layer = decoder.layers[0]
    assert all(norm is not None and norm.plus_one for norm in layer.norms)
    assert [layer.rope for layer in decoder.layers] == ["sliding_attention", "full_attention"]
    assert layer.activation is gelu_tanh
    ropes = decoder.ropes(torch.arange(5)[None])
    assert not torch.equal(*(ropes[name][0] for name in ropes))


def test_a_llama_has_two_norms_and_one_rope() -> None:
    layer = describe_decoder(build("llama")).layers[1]
    assert [norm is not None for norm in layer.norms] == [True, False, True, False, False, False]
    assert (layer.rope, layer.residual_scale, layer.activation) == ("default", 1.0, silu)
    assert (len(layer.qkv), len(layer.gate_up)) == (3, 2)


def test_fused_projections_missing_ropes_scales_and_outer_norms_are_described() -> None:
    phi = describe_decoder(build("phi3")).layers[0]
    assert (len(phi.qkv), len(phi.gate_up)) == (1, 1)
    assert [layer.rope for layer in describe_decoder(build("smollm3")).layers] == ["default", None]
    granite = describe_decoder(build("granite"))
    assert (granite.embed_scale, granite.layers[0].residual_scale) == (3.0, 0.4)
    olmo = describe_decoder(build("olmo2")).layers[0]
    assert [norm is not None for norm in olmo.norms] == [False, True, False, True, True, True]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "MixtralSparseMoeBlock has no gate_proj"),
        ("cohere", "not an RMS norm"),
        ("glm4", "does not know: post_self_attn_layernorm.weight"),
        ("gpt-oss", "sinks"),
        ("deepseek-v3", "different sizes"),
        ("bloom", "attention interface"),
    ],
)
def test_other_layers_are_refused(name: str, reason: str) -> None:
    with pytest.raises(UndescribedError, match=reason):
        describe_decoder(build(name))


@pytest.mark.parametrize("place", ["layer", "trunk"])
def test_a_parameter_that_is_not_described_is_refused_even_if_it_is_zero(place: str) -> None:
    model = build("llama")
    module: Any = model.model if place == "trunk" else model.model.layers[1]
    module.gain = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UndescribedError, match="gain"):
        describe_decoder(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_are_told_by_their_formula_whatever_their_weights(dtype: torch.dtype) -> None:
    plain, offset = (build(name, dtype).model.norm for name in ("llama", "gemma"))
    for weight in (0.0, 1.0):
        with torch.no_grad():
            plain.weight.fill_(weight)
            offset.weight.fill_(weight)
        assert [norm is not None and norm.plus_one for norm in map(rms_norm_of, (plain, offset))] == [False, True]
        assert bool((offset.weight == weight).all())
    assert rms_norm_of(torch.nn.LayerNorm(8)) is None
    assert rms_norm_of(torch.nn.Linear(8, 8)) is None


def test_a_longrope_has_a_limit() -> None:
    config = build("phi3, longrope").config
    assert longrope_limit(config) == max_context(config) == LONG["original_max_position_embeddings"]
    llama = build("llama").config
    assert longrope_limit(llama) is None
    assert max_context(llama) == 128
