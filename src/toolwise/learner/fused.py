"""Norms and activations of a decoder in one pass over memory each, where transformers takes five to ten: on a GPU.

The model's own modules and parameters: only what their `forward` does is exchanged, while the learner runs them, and
only where it is the plain formula, which is tried on a few numbers and not read off a name.

    norm   w · x / √(mean x² + ε), rounded once          MLP   down(silu(gate x) · up x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import rms_norm, silu

from toolwise.kernels import available, kernel

Forward = Callable[[Tensor], Tensor]
_PLAIN: dict[tuple[type, torch.dtype], bool] = {}
"""Classes of modules that were tried, and whether they are what they look like."""


@contextmanager
def fused_parts(trunk: Any) -> Iterator[None]:
    """The trunk's norms and MLPs, fused where there are kernels; nothing changes elsewhere."""
    changed = list(_fused(trunk)) if available(trunk.get_input_embeddings().weight.device) else []
    for module, forward in changed:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in changed:
            del module.forward


def _fused(trunk: Module) -> Iterator[tuple[Module, Forward]]:
    for module in trunk.modules():
        fusing = fused_form(module)
        if fusing is not None and "forward" not in vars(module):  # somebody else's exchange stays
            yield module, fusing


def fused_form(module: Module) -> Forward | None:
    """What the module computes, in few passes; None where it is none of these, or computes something else."""
    if hasattr(module, "variance_epsilon"):
        return _norm(module) if _is_plain(module, _norm(module), getattr(module, "weight", None)) else None
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        weight = getattr(module.gate_proj, "weight", None)
        return _mlp(module, SiluMul.apply) if _is_plain(module, _mlp(module, _written_out), weight) else None
    return None


def _norm(module: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), module.weight.to(x.dtype), module.variance_epsilon)

    return forward


def _mlp(module: Any, product: Callable[..., Tensor]) -> Forward:
    def forward(x: Tensor) -> Tensor:
        found: Tensor = module.down_proj(product(module.gate_proj(x), module.up_proj(x)))
        return found

    return forward


def _written_out(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


@torch.no_grad()
def _is_plain(module: Module, formula: Forward, weight: Any) -> bool:
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return False
    key = type(module), weight.dtype
    if key not in _PLAIN:
        few = torch.linspace(-2.0, 2.0, 2 * weight.shape[-1], device=weight.device).view(2, -1).to(weight.dtype)
        try:
            theirs, ours = module(few).float(), formula(few).float()
        except (TypeError, RuntimeError):  # it wants other things than hidden states
            _PLAIN[key] = False
        else:
            near = 4 * torch.finfo(weight.dtype).eps
            _PLAIN[key] = theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=near, atol=near)
    return _PLAIN[key]


class SiluMul(torch.autograd.Function):
    """silu(gate) · up. Of the three tensors that autograd would keep it keeps the two that are there anyway."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        found: Tensor = kernel("silu_mul", gate.device)(gate.flatten(0, -2), up.flatten(0, -2))
        return found.view_as(gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return kernel("silu_mul_backward", gate.device)(gate, up, grads[0].contiguous())
