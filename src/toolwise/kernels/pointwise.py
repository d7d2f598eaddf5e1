"""Norms and activations of a decoder layer, one pass over memory each, rounded as in transformers.

rms_norm(x) = w · bf16(x / √(mean x² + ε)), or with `plus_one` bf16((1 + w) · x / √(mean x² + ε))
add_rms_norm: r' = r + scale · after(x), rms_norm(r');  after is another norm or nothing
silu_mul: bf16(silu(g)) · u;  gelu_tanh_mul: bf16(gelu(g)) · u, gelu(g) ≈ g · σ(√(8/π) (g + 0.044715 g³))
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.attention_parts import apply_gain
from toolwise.kernels.launch import jit


@jit
def _rms_norm(
    x, residual, weight, after, out, new_residual, x_stride, eps, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, IN_PLACE: tl.constexpr, ADD: tl.constexpr, AFTER: tl.constexpr,
    SCALE: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < WIDTH
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    if NORM:
        gain = tl.load(weight + at, mask=inside, other=0.0)
    if ADD:
        if AFTER:
            after_gain = tl.load(after + at, mask=inside, other=0.0)
            wide = value.to(tl.float32)
            value = apply_gain(value, tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps), after_gain, PLUS_ONE)
        if SCALE:
            value = (value.to(tl.float32) * scale).to(value.dtype)
        before = tl.load(residual + row * WIDTH + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        tl.store(new_residual + row * WIDTH + at, value, mask=inside)
    if NORM:
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        normed = apply_gain(value, inverse, gain, PLUS_ONE)
        if IN_PLACE:
            tl.store(out + row * x_stride + at, normed, mask=inside)
        else:
            tl.store(out + row * WIDTH + at, normed, mask=inside)


@jit
def _gated(gate, up, out, gate_stride, up_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < WIDTH
    g = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + at, mask=inside, other=0.0)
    wide = g.to(tl.float32)
    inner = wide
    if GELU:
        inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    active = (wide / (1.0 + tl.exp(-inner))).to(g.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + at, (active * u.to(tl.float32)).to(g.dtype), mask=inside)


@jit
def _silu_mul_backward(gate, up, grad, grad_gate, grad_up, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    chance = 1.0 / (1.0 + tl.exp(-wide))
    tl.store(grad_up + at, (d * wide * chance).to(g.dtype), mask=inside)
    tl.store(grad_gate + at, (d * u * chance * (1.0 + wide * (1.0 - chance))).to(g.dtype), mask=inside)


def _warps(width: int) -> int:
    return int(min(8, max(1, triton.next_power_of_2(width) // 256)))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False, in_place: bool = False
) -> torch.Tensor:
    """RMS norm over the last dimension of x[..., W]: hidden states, or the heads of q and k."""
    width = x.shape[-1]
    rows = x.view(-1, width) if in_place else x.reshape(-1, width)
    out = x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        _rms_norm[(rows.shape[0],)](
            rows, rows, weight, weight, out, out, rows.stride(0), eps, 1.0, width, triton.next_power_of_2(width),
            in_place, False, False, False, True, plus_one, num_warps=_warps(width),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    plus_one: bool = False,
    after: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(r'), r') with r' = residual + scale · x for x, residual [T, W]; (r', r') without a weight. `after`:
    the weight of a norm of x."""
    width = x.shape[-1]
    new_residual = torch.empty_like(residual)
    out = new_residual if weight is None else torch.empty_like(residual)
    if x.shape[0]:
        _rms_norm[(x.shape[0],)](
            x, residual, x if weight is None else weight, x if after is None else after, out, new_residual,
            x.stride(0), eps, scale, width, triton.next_power_of_2(width),
            False, True, after is not None, scale != 1.0, weight is not None, plus_one, num_warps=_warps(width),
        )  # fmt: skip
    return out, new_residual


def silu_mul(gate_up: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up, from one tensor [T, 2F] with the gate first, or from two tensors [T, F]."""
    return _launch_gated(gate_up, up, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) · up with the tanh approximation, as `silu_mul`."""
    return _launch_gated(gate_up, up, gelu=True)


def _launch_gated(gate_up: torch.Tensor, up: torch.Tensor | None, *, gelu: bool) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    tokens, width = gate.shape
    out = torch.empty(tokens, width, dtype=gate.dtype, device=gate.device)
    tile = min(1024, triton.next_power_of_2(width))
    if tokens:
        with torch.cuda.device_of(gate):
            _gated[(tokens, triton.cdiv(width, tile))](
                gate, up, out, gate.stride(0), up.stride(0), width, tile, gelu, num_warps=4 if tile >= 512 else 1
            )
    return out


def silu_mul_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of silu(gate) · up with respect to both; all tensors are contiguous and have the same shape."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        with torch.cuda.device_of(gate):  # Triton launches on the current device
            _silu_mul_backward[(triton.cdiv(gate.numel(), 2048),)](
                gate, up, grad, grad_gate, grad_up, gate.numel(), 2048, num_warps=8
            )
    return grad_gate, grad_up
