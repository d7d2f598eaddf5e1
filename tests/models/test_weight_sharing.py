"""Copies of modules over the same weights: settings are separate, updates are shared."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from toolwise.models.weight_sharing import shared_copy


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, eos_token_id=1
    )
    return LlamaForCausalLM(config).eval()


IDS = torch.tensor([[1, 2, 3, 4]])


def test_parameters_are_the_same_and_modules_are_not() -> None:
    model = tiny()
    own = shared_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), own.parameters(), strict=True))
    assert not set(map(id, model.modules())) & set(map(id, own.modules()))
    assert type(own) is type(model)
    assert torch.equal(own(IDS).logits, model(IDS).logits)


def test_an_update_and_a_new_parameter_are_seen_by_both() -> None:
    model = tiny()
    own = shared_copy(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1)
    model.model.norm.weight = nn.Parameter(torch.full((16,), 0.3))
    assert torch.equal(own(IDS).logits, model(IDS).logits)
    model.to(torch.float64)
    assert own(IDS).logits.dtype == torch.float64


def test_the_attention_of_a_copy_is_its_own() -> None:
    model = tiny()
    own = shared_copy(model, attention="eager")
    assert {m.config._attn_implementation for m in own.modules() if hasattr(m, "config")} == {"eager"}
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}
    torch.testing.assert_close(own(IDS).logits, model(IDS).logits)


def test_gradients_reach_the_model() -> None:
    model = tiny()
    shared_copy(model)(IDS).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_what_is_set_on_a_copy_stays_there_and_hooks_are_shared() -> None:
    model = tiny()
    own = shared_copy(model)
    own.train()
    own.model.norm.forward = lambda x: x
    assert not any(module.training for module in model.modules())
    assert "forward" not in vars(model.model.norm)
    runs: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    own(IDS)
    assert runs == [1]


def test_modules_can_be_exchanged_and_one_that_stands_twice_stays_one() -> None:
    part = nn.Linear(4, 4)
    whole = nn.Sequential(part, nn.Sequential(part))
    own = shared_copy(whole)
    assert own[0] is own[1][0]
    assert own[0] is not part
    plain = shared_copy(whole, substitute=lambda module: part if module is whole[1] else module)
    assert isinstance(plain[1], nn.Linear)
    assert plain[1].weight is part.weight
