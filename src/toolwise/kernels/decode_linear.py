"""Projections of a decode step together with the norm around them, the activation or the residual sum after them.

    linear_add: r' = r + x·Wᵀ, h = r' ⊙ g, and Σ r'² of each tile of columns
    norm_linear: (h / √(mean r'² + ε))·Wᵀ, or act(gate)·up of it

A layer of a small model takes a GPU as long to launch as to compute, so a step is fastest in the fewest kernels. The
norm of weight g between two projections is divided among them: the factor of a row is applied to its product, so that
the input is read as it is. The product is rounded once less than with a norm of its own.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from toolwise.kernels.dependent_launch import dependent_launch, wait_for_inputs
from toolwise.kernels.launch import jit


@dataclass(frozen=True)
class LinearTiles:
    """Rows and columns of a program's tile of the output, elements of a step along the input, warps, stages."""

    rows: int = 64
    columns: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 4


@jit
def _linear(
    x, weight, bias, squares, gain, residual, out, gained, out_squares, rows, eps,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, ADD: tl.constexpr, GAIN: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, tile of rows). GATED: column n is act(gate) · up of rows n and COLUMNS + n of W."""
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.arange(0, BK)
    row_inside, column_inside = row < rows, column < COLUMNS
    x_at = x + row.to(tl.int64)[:, None] * DEPTH + at[None, :]
    w_at = weight + column.to(tl.int64)[None, :] * DEPTH + at[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    up_acc = acc
    wait_for_inputs(PDL)
    for start in range(0, DEPTH, BK):
        if DEPTH % BK == 0:
            a_inside, w_inside = row_inside[:, None], column_inside[None, :]
        else:
            deep = at < DEPTH - start
            a_inside, w_inside = row_inside[:, None] & deep[None, :], column_inside[None, :] & deep[:, None]
        a = tl.load(x_at + start, mask=a_inside, other=0.0)
        w = tl.load(w_at + start, mask=w_inside, other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
        if GATED:
            u = tl.load(w_at + COLUMNS * DEPTH + start, mask=w_inside, other=0.0)
            up_acc = tl.dot(a, u, up_acc, input_precision="ieee")
    dtype = out.dtype.element_ty
    if NORM:
        part = tl.arange(0, PARTS_PADDED)
        inside = row_inside[:, None] & (part < PARTS)[None, :]
        square = tl.sum(tl.load(squares + row[:, None] * PARTS + part[None, :], mask=inside, other=0.0), 1)
        inverse = tl.rsqrt(square / DEPTH + eps)[:, None]
        acc, up_acc = acc * inverse, up_acc * inverse
    if BIAS:
        acc += tl.load(bias + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    value = acc.to(dtype)
    if GATED:
        if BIAS:
            up_acc += tl.load(bias + COLUMNS + column, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        wide = value.to(tl.float32)
        inner = wide
        if GELU:
            inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
        active = (wide / (1.0 + tl.exp(-inner))).to(dtype).to(tl.float32)
        value = (active * up_acc.to(dtype).to(tl.float32)).to(dtype)
    there = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    stored = row_inside[:, None] & column_inside[None, :]
    if ADD:
        before = tl.load(residual + there, mask=stored, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(dtype)
        wide = tl.where(stored, value.to(tl.float32), 0.0)
        tl.store(out_squares + row * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide, 1), mask=row_inside)
        if GAIN:
            factor = tl.load(gain + column, mask=column_inside, other=0.0).to(tl.float32)
            if PLUS_ONE:
                factor += 1.0
            tl.store(gained + there, (wide * factor[None, :]).to(dtype), mask=stored)
    tl.store(out + there, value, mask=stored)


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    *,
    tiles: LinearTiles | None = None,
) -> torch.Tensor:
    """x·Wᵀ + b for x [B, D]; with `squares` [B, P], as from `linear_add`, the product of each row is divided by
    √(Σ squares / D + ε). `gate`, "silu" or "gelu_tanh": the output's first half through it, times the second half."""
    rows, depth = x.shape
    columns = len(weight) if gate is None else len(weight) // 2
    tiles = tiles or default_tiles(rows, columns, depth, gated=gate is not None)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    parts = 1 if squares is None else squares.shape[1]
    pdl = dependent_launch(x.device)
    _linear[(triton.cdiv(columns, tiles.columns), triton.cdiv(rows, tiles.rows))](
        x, weight, x if bias is None else bias, x if squares is None else squares, x, x, out, x, x, rows, eps,
        columns, depth, parts, triton.next_power_of_2(parts), tiles.rows, tiles.columns, tiles.depth,
        squares is not None, False, gate is not None, gate == "gelu_tanh", False, False, bias is not None, pdl,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor | None = None,
    plus_one: bool = False,
    *,
    tiles: LinearTiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(r', r' ⊙ g, squares) with r' = residual + x·Wᵀ + b, g = gain (or 1 + gain), and Σ r'² of each row in parts,
    [B, P], for `norm_linear`. Without a gain, the second is r'."""
    rows, depth = x.shape
    columns = len(weight)
    tiles = tiles or default_tiles(rows, columns, depth, gated=False)
    out = torch.empty_like(residual)
    gained = out if gain is None else torch.empty_like(residual)
    parts = triton.cdiv(columns, tiles.columns)
    squares = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    pdl = dependent_launch(x.device)
    _linear[(parts, triton.cdiv(rows, tiles.rows))](
        x, weight, x if bias is None else bias, x, x if gain is None else gain, residual, out, gained, squares, rows,
        0.0, columns, depth, 1, 1, tiles.rows, tiles.columns, tiles.depth, False, plus_one, False, False, True,
        gain is not None, bias is not None, pdl,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out, gained, squares


def default_tiles(rows: int, columns: int, depth: int, *, gated: bool) -> LinearTiles:
    """As many programs as an H200 has multiprocessors, where the tiles are not too small for that. Measured there with
    256 rows and the shapes of SmolLM2-135M."""
    return LinearTiles(columns=64 if gated else 32, depth=128 if depth > 1024 else 64)
