"""The learner's own forward and backward pass, with plain kernels on a CPU, against the stock modules in float64.

transformers computes norms in fp32 whatever the precision of the weights, which bounds how well the two agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from architectures import build
from learner_cases import pack, tiny_model
from plain_attention import PlainKernel
from torch import Tensor

from toolwise.config.schema import LoraConfig
from toolwise.kernels.fused_decoder import FusedDecoder
from toolwise.learner import forward
from toolwise.learner.decoder_forward import (
    DecoderForward,
    decoder_forward_problem,
    probe_difference,
    undescribed_reason,
)
from toolwise.learner.forward import TrunkForward, hidden_states
from toolwise.learner.lora import Adapters
from toolwise.learner.tree_attention import attention_parts
from toolwise.models.merged_weights import merged_copy

PROMPT = [3, 5, 7, 9, 11]


@dataclass(frozen=True)
class Tokens:
    ids: list[int]
    sampled: list[bool]


def packed_rows(device: str = "cpu") -> Any:
    rows = [
        Tokens(PROMPT + tail, [False] * len(PROMPT) + [True] * len(tail))
        for tail in ([1, 2, 3, 4], [1, 2, 8, 9, 10], [30, 31])
    ]
    rows.append(Tokens([40, 41, 42, 43], [False, True, True, True]))
    [packed] = pack(rows, 500, share_prefixes=True, device=device)
    return packed


def states_and_gradients(model: Any, states: Tensor) -> list[Tensor]:
    """The hidden states, and the gradient of every trainable parameter for one random direction."""
    torch.manual_seed(1)
    model.zero_grad()
    (states * torch.randn_like(states)).sum().backward()
    trainable = [p for p in model.get_decoder().parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trainable)
    return [states.detach(), *(p.grad.detach().clone() for p in trainable)]


def assert_same_as_stock(model: Any) -> None:
    packed = packed_rows()
    expected = states_and_gradients(model, hidden_states(model, packed))
    fused = DecoderForward(model, PlainKernel())
    found = states_and_gradients(model, fused(packed.ids, packed.positions, attention_parts(packed.segments, "cpu")))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize(
    "name", ["llama", "llama, tied", "llama, biases", "llama, one key head", "qwen2", "qwen3", "mistral", "smollm3"]
)
def test_states_and_gradients_are_those_of_the_stock_modules(name: str) -> None:
    assert_same_as_stock(build(name, torch.float64))


def test_it_recomputes_layers_where_activations_are_checkpointed() -> None:
    model = tiny_model().double()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert DecoderForward(model, PlainKernel()).recompute
    assert_same_as_stock(model)


@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"], ["v_proj", "up_proj"], ["o_proj"]])
def test_adapters_get_their_gradients(targets: list[str] | None) -> None:
    model = tiny_model().double()
    Adapters(model, LoraConfig(rank=4, **({} if targets is None else {"target_modules": targets})), 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.double()
    assert_same_as_stock(model)


def test_the_parameters_stay_those_of_the_model() -> None:
    """Projections of one input share one tensor; training steps, in place, are seen by both."""
    model = tiny_model().double()
    before, packed = dict(model.named_parameters()), packed_rows()
    fused = DecoderForward(model, PlainKernel())
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    found = fused(packed.ids, packed.positions, attention_parts(packed.segments, "cpu"))
    torch.testing.assert_close(found, hidden_states(model, packed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral, sliding", "windows"),
        ("gemma2", "scaled"),
        ("granite", "scaled"),
        ("phi3, partial", "a part of each head"),
        ("phi3, longrope", "length"),
        ("olmo2", "other places"),
        ("gpt-oss", ""),
        ("deepseek-v3", ""),
    ],
)
def test_other_models_keep_their_own_modules(name: str, reason: str) -> None:
    problem = undescribed_reason(build(name, torch.float32))
    assert problem is not None
    assert reason in problem


def _larger(stock: Any, x: Tensor) -> Tensor:
    return 1.5 * stock(x)


def test_a_model_that_computes_something_else_is_found_out() -> None:
    model = tiny_model()
    assert probe_difference(model, PlainKernel()) is None
    mlp = model.model.layers[1].mlp
    mlp.forward = partial(_larger, mlp.forward)
    assert "another formula" in (probe_difference(model, PlainKernel()) or "")


def test_without_a_gpu_the_stock_modules_run() -> None:
    assert decoder_forward_problem(tiny_model()) is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", ["llama", "llama, biases", "qwen2", "qwen3", "smollm3"])
def test_on_a_gpu_it_is_as_close_to_fp32_as_the_stock_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = build(name, torch.float32)
    packed = packed_rows("cuda")
    expected = states_and_gradients(exact.cuda(), hidden_states(exact, packed))
    model = build(name, torch.float32).to("cuda", torch.bfloat16)
    assert decoder_forward_problem(model) is None
    ours = states_and_gradients(model, hidden_states(model, packed))
    monkeypatch.setattr("toolwise.learner.forward.decoder_forward_problem", lambda model: "not now")
    monkeypatch.setattr("toolwise.learner.forward.fuse", lambda copied, original: None)
    stock = states_and_gradients(model, hidden_states(model, packed))

    def error(found: list[Tensor]) -> float:
        return sum(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))

    assert error(ours) < 1.25 * error(stock)


def test_adapted_embeddings_keep_the_stock_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The merged copy's embedding is frozen: their adapters would get no gradient."""
    monkeypatch.setattr("toolwise.learner.decoder_forward.available", lambda device: True)
    model = tiny_model(tie_word_embeddings=False).bfloat16()
    Adapters(model, LoraConfig(rank=4, target_modules=["embed_tokens", "q_proj"]), 0)
    assert decoder_forward_problem(model) == "its embeddings are adapted"


def test_weights_that_others_may_have_joined_are_not_moved() -> None:
    """A reference shares unadapted weights with the engine's merged copy, which joins them with merged ones."""
    model = tiny_model().double().requires_grad_(False)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    packed = packed_rows()
    found = DecoderForward(model, PlainKernel())(packed.ids, packed.positions, attention_parts(packed.segments, "cpu"))
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    torch.testing.assert_close(found, hidden_states(model, packed), rtol=1e-5, atol=1e-5)


def _moved_in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def _replaced_values(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def _joined_by_the_engine(model: Any) -> None:
    _moved_in_place(model)
    FusedDecoder(merged_copy(model))


@pytest.mark.parametrize("change", [_moved_in_place, _replaced_values, _joined_by_the_engine])
@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"], ["q_proj", "k_proj", "v_proj"]])
def test_a_forward_kept_for_the_next_update_computes_the_current_weights(
    targets: list[str] | None, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, packed = tiny_model().double(), packed_rows()
    if targets is not None:
        Adapters(model, LoraConfig(rank=4, target_modules=targets), 0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.double()
    built: list[DecoderForward] = []

    def build_forward(model: Any) -> DecoderForward:
        built.append(DecoderForward(model, PlainKernel()))
        return built[-1]

    with monkeypatch.context() as patched:
        patched.setattr(forward, "decoder_forward_problem", lambda model: None)
        patched.setattr(forward, "DecoderForward", build_forward)
        first = TrunkForward.prepared(model, None)
        assert TrunkForward.prepared(model, first) is first
        before = first(packed).detach()
        change(model)
        found = states_and_gradients(model, TrunkForward.prepared(model, first)(packed))
    expected = states_and_gradients(model, hidden_states(model, packed))
    assert (found[0] - before).norm() > 1e-3 * before.norm()
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
