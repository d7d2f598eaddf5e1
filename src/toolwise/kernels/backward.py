"""Backward passes of norms and activations, one pass over memory each.

y = w·x̂, x̂ = x/√(mean x² + ε):   ∂x = (w·∂y − x̂·mean(w·∂y·x̂))/√(mean x² + ε),   ∂w = Σ ∂y·x̂
y = silu(g)·u:                    ∂g = ∂y·u·σ(g)·(1 + g·(1 − σ(g))),             ∂u = ∂y·silu(g)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.launch import jit

PROGRAMS = 1056
"""Programs of a norm's backward pass, eight for each of an H200's multiprocessors; each sums ∂w over its own rows."""


@jit(do_not_specialize=["rows", "programs"])
def _rms_norm_backward(
    grad, x, weight, grad_total, grad_x, weight_parts, rows, programs, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program (part): every `programs`-th row."""
    part = tl.program_id(0)
    at = tl.arange(0, PADDED)
    inside = at < WIDTH
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([PADDED], tl.float32)
    for row in range(part, rows, programs):
        here = tl.cast(row, tl.int64) * WIDTH + at
        value = tl.load(x + here, mask=inside, other=0.0)
        dtype = value.dtype
        value = value.to(tl.float32)
        dy = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        normed = value * inverse
        weight_sum += dy * normed
        dy = dy * gain
        dx = inverse * (dy - normed * (tl.sum(dy * normed, 0) / WIDTH))
        if ADD:
            dx += tl.load(grad_total + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + here, dx.to(dtype), mask=inside)
    tl.store(weight_parts + part * WIDTH + at, weight_sum, mask=inside)


@jit
def _gated_silu_backward(gate_up, grad, out, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Program (row, tile)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < WIDTH
    here = row * 2 * WIDTH + at
    g = tl.load(gate_up + here, mask=inside, other=0.0)
    u = tl.load(gate_up + here + WIDTH, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    tl.store(out + here, (d * u * sigmoid * (1.0 + wide * (1.0 - sigmoid))).to(g.dtype), mask=inside)
    tl.store(out + here + WIDTH, (d * wide * sigmoid).to(g.dtype), mask=inside)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, grad_total: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(∂x, ∂w) of rms_norm(x) for contiguous x, grad [T, W]. `grad_total` [T, W] is added to ∂x: the gradient of x from
    elsewhere."""
    rows, width = x.shape
    grad, grad_x = grad.contiguous(), torch.empty_like(x)
    programs = max(1, min(rows, PROGRAMS))
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _rms_norm_backward[(programs,)](
            grad, x, weight, grad if grad_total is None else grad_total.contiguous(), grad_x, parts, rows, programs,
            eps, width, padded, grad_total is not None, num_warps=min(16, max(1, padded // 256)),
        )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype)


def gated_silu_backward(gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of silu(gate)·up for contiguous gate_up [T, 2F] and grad [T, F]."""
    out = torch.empty_like(gate_up)
    rows, width = grad.shape
    tile = min(1024, triton.next_power_of_2(width))
    if rows:
        with torch.cuda.device_of(gate_up):
            _gated_silu_backward[(rows, triton.cdiv(width, tile))](
                gate_up, grad.contiguous(), out, width, tile, num_warps=4 if tile >= 512 else 1
            )
    return out
