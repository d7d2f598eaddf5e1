"""Norms, activations and positions of a decoder in one pass over memory each, where transformers takes five to ten: on
a GPU.

The model's own parameters, in a copy of its modules that only the learner runs: there `forward` is exchanged, and the
function in it that turns queries and keys by their positions; and only where it is the plain formula, which is tried on
a few numbers and not read off a name.

    norm   w · x / √(mean x² + ε), rounded once          MLP   down(silu(gate x) · up x)          positions
    `RotateHalf`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import rms_norm, silu

from toolwise.kernels import available, kernel
from toolwise.kernels.torch_reference import rotate

Forward = Callable[[Tensor], Tensor]
Rotate = Callable[..., tuple[Tensor, Tensor]]
ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""What transformers calls it in the file of every model that has it."""
_FORMULA_CHECKS: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()
"""Modules that were tried, and whether they are what they look like."""


def fuse(own: Module, original: Module) -> None:
    """The norms, MLPs and rotations of `own`, fused where there are kernels; nothing changes elsewhere. `own` is a
    copy of `original` that nobody else runs (`shared_copy`), so that whatever is tried is tried once."""
    if not available(next(original.parameters()).device):
        return
    for module, tried in zip(own.modules(), original.modules(), strict=True):
        if "forward" in vars(module):
            continue  # somebody else's exchange stays
        if fused_forward(tried) is not None:
            module.forward = _build_fused_forward(module)
        else:
            rotating = _with_fused_rotary(type(module).forward)
            if rotating is not None:
                module.forward = MethodType(rotating, module)


def fused_forward(module: Any) -> Forward | None:
    """What the module computes, in few passes; None where it is none of these, or computes something else."""
    if hasattr(module, "variance_epsilon"):
        return (
            _build_fused_forward(module)
            if _matches_formula(module, _norm(module), getattr(module, "weight", None))
            else None
        )
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        weight = getattr(module.gate_proj, "weight", None)
        return _build_fused_forward(module) if _matches_formula(module, _mlp(module, _silu_mul_torch), weight) else None
    return None


def _build_fused_forward(module: Any) -> Forward:
    return _norm(module) if hasattr(module, "variance_epsilon") else _mlp(module, SiluMul.apply)


def _norm(module: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), module.weight.to(x.dtype), module.variance_epsilon)

    return forward


def _mlp(module: Any, product: Callable[..., Tensor]) -> Forward:
    def forward(x: Tensor) -> Tensor:
        found: Tensor = module.down_proj(product(module.gate_proj(x), module.up_proj(x)))
        return found

    return forward


def _silu_mul_torch(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _matches_formula(module: Module, formula: Forward, weight: Any) -> bool:
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return False
    if module not in _FORMULA_CHECKS:
        _FORMULA_CHECKS[module] = _same_outputs(module, formula, weight) and _same_outputs(
            getattr(module, "act_fn", silu), silu, weight
        )
    return _FORMULA_CHECKS[module]


@torch.no_grad()
def _same_outputs(theirs: Any, ours: Forward, weight: Tensor) -> bool:
    """Whether both say the same of a few hidden states, up to rounding, relative to what they say: it may be small."""
    few = torch.linspace(-3.0, 3.0, 2 * weight.shape[-1], device=weight.device).view(2, -1).to(weight.dtype)
    try:
        wanted, found = theirs(few).float(), ours(few).float()
    except Exception:  # somebody else's code, which wants other things than hidden states
        return False
    if wanted.shape != found.shape:
        return False
    return bool((wanted - found).abs().max() <= 4 * torch.finfo(weight.dtype).eps * wanted.abs().max())


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


@cache
def _with_fused_rotary(forward: Any) -> Any:
    """The same function, in which the name of the model's rotation stands for ours; None where it has none."""
    if not isinstance(forward, FunctionType) or ROTARY_FUNCTION not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(ROTARY_FUNCTION)
    if theirs is None or not _is_rotate_half(theirs):
        return None
    names = {**forward.__globals__, ROTARY_FUNCTION: partial(_apply_rotary, theirs)}
    found = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def _apply_rotary(
    theirs: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """[1, heads, T, size] in and out, [1, T, size] of cosines and sines. What is not packed rows goes to `theirs`."""
    packed = q.dim() == 4 and len(q) == len(k) == 1 and cos.shape == sin.shape == (1, *q.shape[2:]) == (1, *k.shape[2:])
    if others or options or not packed or not available(q.device):
        return theirs(q, k, cos, sin, *others, **options)
    angles = cos[0].contiguous(), sin[0].contiguous()
    turned = (RotateHalf.apply(x.squeeze(0).transpose(0, 1), *angles) for x in (q, k))  # type: ignore[no-untyped-call]
    q, k = (x.transpose(0, 1)[None] for x in turned)
    return q, k


class RotateHalf(torch.autograd.Function):
    """[T, heads, size], the halves of each head turned by the angles of its token, [T, size]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        found: Tensor = kernel("rotate", x.device)(_contiguous_heads(x), cos, sin)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return kernel("rotate", grads[0].device)(_contiguous_heads(grads[0]), *ctx.saved_tensors, back=True), None, None


def _contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def _is_rotate_half(theirs: Rotate) -> bool:
    """Some turn neighbours, or a part of each head."""
    drawn = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.rand((1, *shape), generator=drawn, dtype=torch.float32, device="cpu")
        for shape in ((2, 3, 8), (1, 3, 8), (3, 8), (3, 8))
    )
    try:
        turned = theirs(q, k, cos, sin)
        return all(
            torch.allclose(one[0].transpose(0, 1), rotate(x[0].transpose(0, 1), cos[0], sin[0]), atol=1e-6)
            for one, x in zip(turned, (q, k), strict=True)
        )
    except Exception:  # somebody else's code, which wants other things
        return False
