"""Fused norms and MLPs: the same values and gradients, and only the learner's copy of the model is patched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import build
from learner_cases import pack, tiny_model
from torch import nn
from transformers.models.llama import modeling_llama

from toolwise.kernels import torch_reference
from toolwise.learner import fused_modules
from toolwise.learner.forward import hidden_states, token_logprobs
from toolwise.learner.fused_modules import RotateHalf, SiluMul, can_fuse, fuse
from toolwise.models.decoder_layers import rms_norm_of
from toolwise.models.weight_sharing import shared_copy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Row:
    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        beginning = [3, 4, 5, 6, 7]  # shared by all
        self.ids = beginning + torch.randint(1, 20, (6,), generator=draw).tolist()
        self.sampled = [False] * 5 + [True] * 6


class Doubled(nn.Module):
    """Looks like a norm but has a different formula: where its weights are one, that of Gemma's norms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class Gated(nn.Module):
    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.act_fn = act_fn
        with torch.no_grad():
            for weight in self.parameters():
                weight.normal_(std=0.005)  # so that its output is small

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but with the torch reference kernels."""
    monkeypatch.setattr(fused_modules, "available", lambda device: True)


def fused_copy(model: Any) -> Any:
    own = shared_copy(model)
    fuse(own, model)
    return own


def exchanged(model: Any) -> int:
    return sum("forward" in vars(module) for module in model.modules())


def update(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    batches = pack([Row(i) for i in range(4)], 64, share_prefixes=True, device="cpu")
    found = torch.cat([token_logprobs(model, hidden_states(model, p), p, 1.0)[0] for p in batches])
    (found * torch.linspace(-1, 1, len(found))).sum().backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_is_the_same(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    logprobs, gradients = update(model)
    anywhere(monkeypatch)
    calls = []
    monkeypatch.setattr(fused_modules, "rms_norm", lambda *a: calls.append("norm") or torch.nn.functional.rms_norm(*a))
    checked = []
    monkeypatch.setattr(fused_modules, "rms_norm_of", lambda norm: checked.append(norm) or rms_norm_of(norm))
    if checkpointing:
        model.gradient_checkpointing_enable()
    again, others = update(model)
    torch.testing.assert_close(again, logprobs, rtol=1e-5, atol=1e-6)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    norms = 2 * model.config.num_hidden_layers
    assert len(calls) == norms * (1 + checkpointing) + 1
    update(model)
    assert len(checked) == norms + 1, "each is checked once"


def test_only_a_copy_of_the_modules_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere(monkeypatch)
    model = tiny_model()
    own = fused_copy(model)
    layers = model.config.num_hidden_layers
    assert exchanged(own) == 4 * layers + 1, "two norms, an MLP and an attention a layer, and the last norm"
    assert exchanged(model) == 0
    update(model)
    assert exchanged(model) == 0


def test_without_kernels_nothing_is_patched() -> None:
    assert exchanged(fused_copy(tiny_model())) == 0


def test_an_already_patched_forward_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere(monkeypatch)
    model = tiny_model()
    model.model.norm.forward = theirs = lambda x: x
    assert fused_copy(model).model.norm.forward is theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("module", [Doubled(), Gated(nn.GELU()), nn.Linear(4, 4)])
def test_modules_with_another_formula_are_not_patched(module: nn.Module, dtype: torch.dtype) -> None:
    assert not can_fuse(copy.deepcopy(module).to(dtype))


@pytest.mark.parametrize("name", ["gemma2", "phi3", "granite"])
def test_norms_and_mlps_of_other_families_are_patched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's norms have factors 1 + w, and its MLPs another activation; Phi's MLP has one projection for two."""
    model = build(name)
    logprobs, gradients = update(model)
    anywhere(monkeypatch)
    layers = model.config.num_hidden_layers
    patched = {"gemma2": 5 * layers + 1, "phi3": 4 * layers + 1, "granite": 4 * layers + 1}
    assert exchanged(fused_copy(model)) == patched[name]
    again, others = update(model)
    torch.testing.assert_close(again, logprobs, rtol=1e-5, atol=1e-5)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(others[parameter], gradient, rtol=1e-4, atol=1e-4, msg=parameter)


def test_a_class_may_have_several_activations() -> None:
    assert can_fuse(Gated(nn.SiLU()))
    assert not can_fuse(Gated(nn.GELU()))
    assert can_fuse(Gated(nn.SiLU()))


def test_the_gradient_of_the_activation_is_that_of_its_formula() -> None:
    gate, up = (torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(SiluMul.apply, (gate, up))


def test_queries_and_keys_are_rotated_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere(monkeypatch)
    turned: list[bool] = []

    def count(*args: Any, back: bool = False) -> torch.Tensor:
        turned.append(back)
        return torch_reference.rotate(*args, back=back)

    monkeypatch.setattr(
        fused_modules, "kernel", lambda name, device: count if name == "rotate" else getattr(torch_reference, name)
    )
    model = tiny_model()
    theirs = modeling_llama.apply_rotary_pos_emb
    update(model)
    each = 2 * model.config.num_hidden_layers
    assert sorted(turned) == [False] * each + [True] * each
    assert modeling_llama.apply_rotary_pos_emb is theirs


def test_rotations_of_other_kinds_are_left_alone() -> None:
    def neighbours(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        pairs = [torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) for x in (q, k)]
        return tuple(x * cos[:, None] + p * sin[:, None] for x, p in zip((q, k), pairs, strict=True))

    assert fused_modules._is_rotate_half(modeling_llama.apply_rotary_pos_emb)
    assert not fused_modules._is_rotate_half(neighbours)
    assert not fused_modules._is_rotate_half(lambda q, k, cos, sin, *, sections: (q, k))


@pytest.mark.parametrize(("rows", "size"), [(2, 8), (1, 4)])
def test_unpacked_inputs_use_the_model_s_own_rotary(rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of rows; angles for a part of each head."""
    anywhere(monkeypatch)
    asked = []
    q, k, cos, sin = torch.randn(rows, 2, 3, 8), torch.randn(rows, 1, 3, 8), *torch.randn(2, rows, 3, size)
    fused_modules._apply_rotary(lambda *given: asked.append(given) or (q, k), q, k, cos, sin)
    assert len(asked) == 1


def test_the_gradient_of_a_rotation_is_that_of_its_formula() -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 3, 8, dtype=torch.float64)  # arbitrary: the halves need not be equal
    assert torch.autograd.gradcheck(RotateHalf.apply, (x, cos, sin))
    across = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: RotateHalf.apply(y.transpose(0, 1), cos, sin), (across,))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_compute_what_the_formulas_say(dtype: torch.dtype) -> None:
    gate, up, grad = (torch.randn(700, 1536, device="cuda", dtype=dtype) for _ in range(3))
    own = [t.clone().requires_grad_() for t in (gate, up)]
    out = SiluMul.apply(*own)
    out.backward(grad)
    exact = [t.double().requires_grad_() for t in (gate, up)]
    truth = torch_reference.silu_mul(*exact)
    truth.backward(grad.double())
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in ((out, truth), (own[0].grad, exact[0].grad), (own[1].grad, exact[1].grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=near, atol=near)
