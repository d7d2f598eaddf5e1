"""Merged LoRA weights, with real peft: what is written when, how it is rounded, and the gradients through it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any, cast

import pytest
import torch
from architectures import build
from learner_cases import pack, tiny_model
from torch import nn

from toolwise.config.schema import LoraConfig
from toolwise.learner import fused_modules
from toolwise.learner.forward import hidden_states, token_logprobs
from toolwise.learner.lora import Adapters
from toolwise.models import merged_weights
from toolwise.models.merged_weights import (
    AdaptedLinear,
    PassLinear,
    is_adapter,
    merge_in_passes,
    merged_copy,
    plain_layer,
    rounded,
    trainable_layer,
)
from toolwise.models.weight_sharing import shared_copy


class Row:
    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = [3, 4, 5, 6, 7, *torch.randint(1, 20, (6,), generator=draw).tolist()]
        self.sampled = [False] * 5 + [True] * 6


@torch.no_grad()
def move(model: Any, seed: int = 0, size: float = 0.2) -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.copy_(size * torch.randn(weight.shape, generator=draw))


def adapted(model: Any, *targets: str, rank: int = 3) -> Adapters:
    adapters = Adapters(model, LoraConfig(rank=rank, alpha=5.0, target_modules=list(targets)))
    move(model)
    return adapters


def peft_merged(adapters: Adapters) -> Any:
    return copy.deepcopy(adapters.wrapped).merge_and_unload()


def same_weights(left: Any, right: Any) -> None:
    expected = right.state_dict()
    assert left.state_dict().keys() == expected.keys()
    for name, weight in left.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_the_weights_are_those_that_peft_merges(name: str) -> None:
    adapters = adapted(build(name))
    same_weights(merged_copy(adapters.model), peft_merged(adapters))


def test_embeddings_and_an_untied_head_are_merged_too() -> None:
    adapters = adapted(tiny_model(), "embed_tokens", "lm_head")
    same_weights(merged_copy(adapters.model), peft_merged(adapters))


def test_a_model_without_adapters_is_returned_as_it_is() -> None:
    model = tiny_model()
    assert merged_copy(model) is model


def test_there_is_one_set_of_merged_weights_and_the_rest_is_shared() -> None:
    model = tiny_model()
    adapted(model, "q_proj")
    first, second = merged_copy(model), merged_copy(shared_copy(model))
    assert [p.data_ptr() for p in first.parameters()] == [p.data_ptr() for p in second.parameters()]
    own = {id(parameter) for parameter in model.parameters()}
    new = [name for name, parameter in first.named_parameters() if id(parameter) not in own]
    assert new == [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)]
    trained = trainable_layer(model.model.layers[0].self_attn.q_proj)
    assert isinstance(trained, AdaptedLinear)
    assert trained.weight is first.model.layers[0].self_attn.q_proj.weight


@pytest.mark.parametrize("optimizer", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_a_step_of_an_optimizer_is_noticed(optimizer: dict[str, bool]) -> None:
    """A fused one does not count as writing to what it changes."""
    model = tiny_model()
    adapters = adapted(model)
    weight = merged_copy(model).model.layers[0].mlp.up_proj.weight
    address, before = weight.data_ptr(), weight.clone()
    steps = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, **optimizer)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    steps.step()
    same_weights(merged_copy(model), peft_merged(adapters))
    assert weight.data_ptr() == address, "captured graphs hold the address"
    assert not torch.equal(weight, before)


def test_a_model_that_moves_to_another_precision_is_merged_again() -> None:
    model = tiny_model()
    adapted(model)
    merged_copy(model)
    model.to(torch.float64)
    merged = merged_copy(model).model.layers[0].mlp.up_proj.weight
    assert merged.dtype == torch.float64
    layer = model.model.layers[0].mlp.up_proj
    torch.testing.assert_close(merged, layer.base_layer.weight + layer.get_delta_weight("default"))


def replace_data(model: Any, new: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in new:
            parameter.data = new[name]


def replace_vector(model: Any, new: dict[str, torch.Tensor]) -> None:
    vector = torch.cat([tensor.flatten() for tensor in new.values()])
    torch.nn.utils.vector_to_parameters(vector, [p for name, p in model.named_parameters() if name in new])


def replace_parameters(model: Any, new: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(new, strict=False, assign=True)


def replace_all_parameters(model: Any, new: dict[str, torch.Tensor]) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state | new, assign=True)


@pytest.mark.parametrize("replace", [replace_data, replace_vector, replace_parameters, replace_all_parameters])
def test_replaced_adapters_are_noticed(replace: Any) -> None:
    model = tiny_model()
    adapters = adapted(model)
    weight = merged_copy(model).model.layers[0].mlp.up_proj.weight
    address = weight.data_ptr()
    for n in (2.0, 3.0, 5.0):  # of three, one could be at the address of the first
        replace(model, {name: n * p.detach() for name, p in model.named_parameters() if "lora_" in name})
        if n > 2:
            same_weights(merged_copy(model), peft_merged(adapters))
    assert weight.data_ptr() == address == merged_copy(model).model.layers[0].mlp.up_proj.weight.data_ptr()
    layer = model.model.layers[0].mlp.up_proj
    trained = trainable_layer(layer)
    assert isinstance(trained, AdaptedLinear)
    assert trained.lora_a is layer.lora_A["default"].weight, "the gradients go to the new ones"


def test_replaced_adapters_of_a_copy_leave_the_original_alone() -> None:
    model = tiny_model()
    adapted(model)
    tensors = {id(parameter): parameter for parameter in model.parameters()}
    other = copy.deepcopy(model, dict(tensors))  # its own modules with the same parameters
    before = merged_copy(other).model.layers[0].mlp.up_proj.weight
    kept = before.clone()
    assert merged_copy(model).model.layers[0].mlp.up_proj.weight is before
    replace_parameters(model, {name: 2 * p.detach() for name, p in model.named_parameters() if "lora_" in name})
    after = merged_copy(model).model.layers[0].mlp.up_proj.weight
    assert merged_copy(other).model.layers[0].mlp.up_proj.weight is before
    assert torch.equal(before, kept)
    assert not torch.equal(after, kept)


def test_replaced_adapters_keep_their_place_in_copies_that_share_them() -> None:
    model = tiny_model()
    adapters = adapted(model)
    other = shared_copy(model)
    before = merged_copy(other).model.layers[0].mlp.up_proj.weight
    merged_copy(model)
    replace_parameters(model, {name: 2 * p.detach() for name, p in model.named_parameters() if "lora_" in name})
    assert merged_copy(model).model.layers[0].mlp.up_proj.weight is before
    same_weights(merged_copy(other), peft_merged(adapters))


def test_weights_are_freed_with_their_model() -> None:
    model = tiny_model()
    adapters = adapted(model)
    held = weakref.ref(merged_copy(model).model.layers[0].mlp.up_proj.weight)
    base = weakref.ref(model.model.layers[0].mlp.up_proj.base_layer.weight)
    del model, adapters
    gc.collect()
    assert held() is None
    assert base() is None


# --- rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_that_fit_stay_and_others_go_to_a_neighbour_in_proportion(dtype: torch.dtype) -> None:
    fits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    assert torch.equal(rounded(fits, dtype, 1), fits)
    step = torch.finfo(dtype).eps  # from 1 to the next
    for share in (0.1, 0.5, 0.9):
        for sign in (1.0, -1.0):
            found = rounded(torch.full((20_000,), sign * (1 + share * step)), dtype, 1)
            assert set(found.tolist()) == {sign, sign * (1 + step)}
            assert (found != sign).float().mean().item() == pytest.approx(share, abs=0.02)


def test_rounding_is_the_same_every_time_and_fp32_is_not_rounded() -> None:
    values = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(values, torch.bfloat16, 3), rounded(values, torch.bfloat16, 3))
    assert not torch.equal(rounded(values, torch.bfloat16, 3), rounded(values, torch.bfloat16, 4))
    assert rounded(values, torch.float32, 3) is values
    assert not rounded(torch.tensor([torch.nan]), torch.bfloat16, 0).isfinite().any()


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4])
def test_small_updates_are_not_lost_in_half_precision(size: float) -> None:
    """The base weights fit bf16, so rounding to the nearest number would return them: nothing would be learned until
    the adapters have grown. A loss falls by as much as with exact weights, computed in fp32 for the weights alone."""
    model = tiny_model(hidden_size=128, intermediate_size=256, initializer_range=0.05).to(torch.bfloat16)
    adapters = Adapters(model, LoraConfig(rank=8, alpha=32.0))
    ids = torch.randint(2, 48, (8, 48), generator=torch.Generator().manual_seed(0))

    def loss(weights: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(weights.float()(input_ids=ids).logits[:, :-1].mT, ids[:, 1:])

    start = copy.deepcopy(adapters.wrapped)
    begun = loss(start)
    begun.backward()
    gradients = {name: p.grad for name, p in start.named_parameters() if "lora_B" in name}
    with torch.no_grad():
        for name, parameter in adapters.wrapped.named_parameters():
            if name in gradients:
                parameter.copy_(-size * gradients[name].sign())
        expected = loss(copy.deepcopy(adapters.wrapped)) - begun
        found = loss(copy.deepcopy(merged_copy(model))) - begun
        nearest = loss(copy.deepcopy(adapters.wrapped).merge_and_unload()) - begun
    assert expected < 0
    assert found / expected == pytest.approx(1.0, abs=0.35)
    if size <= 1e-5:
        assert nearest / expected < 0.3, "or this test shows nothing"


# --- gradients


def gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and gradients of a packed update."""
    model.zero_grad()
    batches = pack([Row(i) for i in range(4)], 64, share_prefixes=True, device="cpu")
    found = torch.cat([token_logprobs(model, hidden_states(model, p), p, 1.0)[0] for p in batches])
    (found * torch.linspace(-1, 1, len(found))).sum().backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same by peft's own modules, row by row."""
    model.zero_grad()
    found = []
    for packed in pack([Row(i) for i in range(4)], 64, share_prefixes=True, device="cpu"):
        ids = torch.tensor([Row(i).ids for i in range(4)])
        logp = torch.log_softmax(model(input_ids=ids).logits, -1)
        found.append(logp[packed.row, packed.at - 1, packed.target])
    logprobs = torch.cat(found)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all("lora_" in name for name in found), "nothing else is trained"
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 2e-5, f"{name}: relative error {error:.1g}"


@pytest.mark.parametrize("fused", [False, True], ids=["stock modules", "fused modules"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_peft(checkpointing: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    adapted(model)
    expected, expected_gradients = plain_gradients(model)
    used: list[str] = []
    if fused:
        monkeypatch.setattr(fused_modules, "available", lambda device: True)
        monkeypatch.setattr(
            fused_modules, "rms_norm", lambda *a: used.append("norm") or torch.nn.functional.rms_norm(*a)
        )
        product = fused_modules.SiluMul.apply
        monkeypatch.setattr(fused_modules.SiluMul, "apply", lambda *a: used.append("mlp") or product(*a))
    if checkpointing:
        model.gradient_checkpointing_enable()
    found, found_gradients = gradients(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    same_gradients(found_gradients, expected_gradients)
    assert set(used) == ({"norm", "mlp"} if fused else set())


@pytest.mark.parametrize("targets", [("lm_head", "embed_tokens", "o_proj"), ("q_proj",), ("down_proj", "k_proj")])
def test_gradients_of_some_layers_are_those_of_peft(targets: tuple[str, ...]) -> None:
    model = tiny_model()
    adapted(model, *targets)
    _, expected = plain_gradients(model)
    _, found = gradients(model)
    same_gradients(found, expected)


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_gradients_of_other_architectures_are_those_of_peft(name: str) -> None:
    """Transposed weights with biases, and layers that compute several projections at once."""
    model = build(name)
    adapted(model)
    expected, expected_gradients = plain_gradients(model)
    found, found_gradients = gradients(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    same_gradients(found_gradients, expected_gradients)


def test_frozen_weights_have_no_gradients_and_nothing_is_kept_for_them() -> None:
    """What the backward pass needs is the input of adapted layers, and no activation in another precision."""
    model = tiny_model().to(torch.bfloat16)
    adapted(model, "down_proj")
    layer = trainable_layer(model.model.layers[0].mlp.down_proj)
    kept: list[torch.Tensor] = []
    x = torch.randn(1, 40, 48, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x).sum().backward()
    activations = [tensor for tensor in kept if 40 in tensor.shape]
    assert [(t.data_ptr(), t.dtype) for t in activations] == [(x.data_ptr(), torch.bfloat16)]
    assert layer.weight.grad is None
    assert x.grad is not None
    frozen = plain_layer(model.model.layers[0].mlp.up_proj)
    assert isinstance(frozen, nn.Linear)
    assert not frozen.weight.requires_grad


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_added_up_in_each_pass_are_the_merged_ones(name: str, dtype: torch.dtype) -> None:
    """Bit by bit, with the same gradients: learners with divided weights must compute with those of the engine."""
    model = build(name).to(dtype)
    adapted(model)
    module: Any = next(part for part in model.modules() if is_adapter(part))
    kept: Any = trainable_layer(module)
    weight = cast("Any", plain_layer(module)).weight.clone()
    merge_in_passes(model)
    passing = trainable_layer(module)
    assert isinstance(passing, PassLinear)
    assert torch.equal(passing.merged(module.base_layer.weight), weight.t() if passing.transposed else weight)
    assert module not in merged_weights._BY_ADAPTER
    x = torch.randn(5, kept.weight.shape[0 if passing.transposed else 1]).to(dtype).requires_grad_()
    found = []
    for layer in (kept, passing):
        inputs = [x, passing.lora_a, passing.lora_b]
        out = layer(x)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
