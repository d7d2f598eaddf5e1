"""Fused norms, MLP activations and rotary embeddings on a GPU: one pass over memory each instead of five to ten.

Patches a copy of the model's modules that shares its parameters and that only the learner runs: it replaces `forward`,
and the rotary function that `forward` calls. A module is patched only if it computes the plain formula, which is
checked on a few inputs rather than by class name.

    norm     w · x / √(mean x² + ε), or with 1 + w, rounded once
    MLP      down(silu(gate x) · up x), with gate and up apart or in one projection
    rotary   `RotateHalf`
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
from toolwise.models.decoder_layers import RmsNorm, rms_norm_of, same_outputs

Forward = Callable[[Tensor], Tensor]
Rotate = Callable[..., tuple[Tensor, Tensor]]
ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""Name of the rotary function in every transformers model file that has one."""
_FORMULA_CHECKS: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()
"""Modules already checked -> whether they compute the plain formula."""
_NORMS: WeakKeyDictionary[Module, RmsNorm | None] = WeakKeyDictionary()


def fuse(copied: Module, original: Module) -> None:
    """Patch the norms, MLPs and rotary embeddings of `copied`; do nothing on devices without kernels. `copied` is a
    `shared_copy` of `original`, perhaps with other layers in place of adapters; checks run on `original`, so each
    module is checked only once."""
    if not available(next(original.parameters()).device):
        return
    originals = dict(original.named_modules())
    for name, module in copied.named_modules():
        source = originals.get(name)
        if source is None or "forward" in vars(module):
            continue  # part of a substitute, or already patched by someone else
        if can_fuse(source):
            norm = _as_norm(source)
            module.forward = _mlp(module, SiluMul.apply) if norm is None else _norm(module, norm)
        elif (rotary_forward := _with_fused_rotary(type(module).forward)) is not None:
            module.forward = MethodType(rotary_forward, module)


def can_fuse(module: Any) -> bool:
    """Whether the module is a norm or MLP with the plain formula."""
    if _as_norm(module) is not None:
        return True
    # A mixture of experts holds its weights as plain tensors under these names.
    parts = (getattr(module, name, None) for name in ("gate_up_proj", "gate_proj"))
    first = next((part for part in parts if isinstance(part, Module)), None)
    if first is None or not hasattr(module, "down_proj") or _activation(module) is None:
        return False
    return _matches_formula(module, _mlp(module, _silu_mul_torch), getattr(first, "weight", None))


def _as_norm(module: Any) -> RmsNorm | None:
    """The module as an RMS norm, checked once."""
    if not hasattr(module, "variance_epsilon") and not hasattr(module, "eps"):
        return None
    if module not in _NORMS:
        _NORMS[module] = rms_norm_of(module)
    return _NORMS[module]


def _norm(module: Any, norm: RmsNorm) -> Forward:
    def forward(x: Tensor) -> Tensor:
        if norm.plus_one:  # computed in fp32 and rounded once
            return rms_norm(x.float(), (x.shape[-1],), 1.0 + module.weight.float(), norm.epsilon).type_as(x)
        return rms_norm(x, (x.shape[-1],), module.weight.to(x.dtype), norm.epsilon)

    return forward


def _activation(module: Any) -> Any:
    return getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)


def _mlp(module: Any, product: Callable[..., Tensor]) -> Forward:
    def forward(x: Tensor) -> Tensor:
        if hasattr(module, "gate_up_proj"):
            gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = module.gate_proj(x), module.up_proj(x)
        out: Tensor = module.down_proj(product(gate, up))
        return out

    return forward


def _silu_mul_torch(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _matches_formula(module: Module, formula: Forward, weight: Any) -> bool:
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return False
    if module not in _FORMULA_CHECKS:
        _FORMULA_CHECKS[module] = same_outputs(module, formula, weight) and same_outputs(
            _activation(module), silu, weight
        )
    return _FORMULA_CHECKS[module]


class SiluMul(torch.autograd.Function):
    """silu(gate) · up. Saves only the two inputs, where autograd would save a third tensor."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out: Tensor = kernel("silu_mul", gate.device)(gate.flatten(0, -2), up.flatten(0, -2))
        return out.view_as(gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return kernel("silu_mul_backward", gate.device)(gate, up, grads[0].contiguous())


@cache
def _with_fused_rotary(forward: Any) -> Any:
    """A copy of `forward` that calls our rotary function instead of the model's; None if it calls none."""
    if not isinstance(forward, FunctionType) or ROTARY_FUNCTION not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(ROTARY_FUNCTION)
    if theirs is None or not _is_rotate_half(theirs):
        return None
    patched_globals = {**forward.__globals__, ROTARY_FUNCTION: partial(_apply_rotary, theirs)}
    patched = FunctionType(
        forward.__code__, patched_globals, forward.__name__, forward.__defaults__, forward.__closure__
    )
    patched.__kwdefaults__ = forward.__kwdefaults__
    return patched


def _apply_rotary(
    theirs: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """q and k [1, heads, T, size], cos and sin [1, T, size]. Falls back to `theirs` for inputs that are not packed."""
    packed = q.dim() == 4 and len(q) == len(k) == 1 and cos.shape == sin.shape == (1, *q.shape[2:]) == (1, *k.shape[2:])
    if args or options or not packed or not available(q.device):
        return theirs(q, k, cos, sin, *args, **options)
    angles = cos[0].contiguous(), sin[0].contiguous()
    rotated = (RotateHalf.apply(x.squeeze(0).transpose(0, 1), *angles) for x in (q, k))  # type: ignore[no-untyped-call]
    q, k = (x.transpose(0, 1)[None] for x in rotated)
    return q, k


class RotateHalf(torch.autograd.Function):
    """Rotate-half rope of x [T, heads, size] by cos and sin [T, size]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out: Tensor = kernel("rotate", x.device)(_contiguous_heads(x), cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return kernel("rotate", grads[0].device)(_contiguous_heads(grads[0]), *ctx.saved_tensors, back=True), None, None


def _contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def _is_rotate_half(theirs: Rotate) -> bool:
    """Whether a model's rotary function is rotate-half: some rotate neighbouring pairs, or only part of each head."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.rand((1, *shape), generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((2, 3, 8), (1, 3, 8), (3, 8), (3, 8))
    )
    try:
        rotated = theirs(q, k, cos, sin)
        return all(
            torch.allclose(out[0].transpose(0, 1), rotate(x[0].transpose(0, 1), cos[0], sin[0]), atol=1e-6)
            for out, x in zip(rotated, (q, k), strict=True)
        )
    except Exception:  # model code that may expect other inputs
        return False
