"""Pieces of the attention kernels: one pass over the keys with a running softmax, rope, and constants of a layer.

A sliding window (the last WINDOW keys), a soft cap of the scores, s' = cap · tanh(s / cap), rope over a part of each
head and head sizes that are not a power of two (DIM, padded to WIDE) are compile-time constants: a layer without them
runs code without them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from toolwise.kernels.launch import jit

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: keys per tile, warps per program, pipeline stages."""

    keys: int = 64
    warps: int = 2
    stages: int = 3


@jit
def scores_of(products, scale, CAP: tl.constexpr):
    """Base-2 scores of q · k; with a soft cap, `scale` and CAP are those of `score_constants`."""
    scores = products * scale
    if CAP > 0.0:
        scores = CAP * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@jit
def attend(
    q, acc, top, total, k_cache, v_cache, table, first, last, limits, kv_head, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Continue the running softmax (acc, top, total; base 2) of the rows of q over the keys first..last. `limits` are
    the rows' positions, for CAUSAL and WINDOW."""
    d = tl.arange(0, WIDE)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        held = keys < last
        block = tl.load(table + keys // BLOCK, mask=held, other=0).to(tl.int64)
        at = ((block * BLOCK + keys % BLOCK) * KV_HEADS + kv_head) * DIM
        k_inside, v_inside = held[None, :], held[:, None]
        if WIDE != DIM:
            k_inside, v_inside = k_inside & (d < DIM)[:, None], v_inside & (d < DIM)[None, :]
        k = tl.load(k_cache + at[None, :] + d[:, None], mask=k_inside, other=0.0)
        v = tl.load(v_cache + at[:, None] + d[None, :], mask=v_inside, other=0.0)
        seen = held[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= limits[:, None])
        if WINDOW > 0:
            seen = seen & (keys[None, :] > limits[:, None] - WINDOW)
        scores = tl.where(seen, scores_of(tl.dot(q, k, input_precision="ieee"), scale, CAP), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = higher
        if WINDOW > 0:  # a row may have seen no key yet, and −∞ − (−∞) is not a number
            base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        p = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return acc, top, total


@jit
def apply_gain(x, inverse, gain, PLUS_ONE: tl.constexpr):
    """x · inverse · gain, rounded as in transformers: Llama's norms round before they apply the weight, Gemma's, whose
    factor is 1 + weight, after it."""
    normed = x.to(tl.float32) * inverse
    if PLUS_ONE:
        return (normed * (1.0 + gain.to(tl.float32))).to(x.dtype)
    else:
        return (gain.to(tl.float32) * normed.to(x.dtype).to(tl.float32)).to(x.dtype)


@jit
def load_rotated(
    rows, cos, sin, weight, mask, eps,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Rotate-half rope of the first ROTARY elements of the [n, DIM] vectors at the row pointers `rows` [n, 1], rounded
    as in transformers."""
    d = tl.arange(0, WIDE)[None, :]
    sign = tl.where(d < ROTARY // 2, -1.0, 1.0)
    if ROTARY == WIDE:
        partner = (d + WIDE // 2) % WIDE
    else:
        partner = tl.where(d < ROTARY // 2, d + ROTARY // 2, tl.where(d < ROTARY, d - ROTARY // 2, d))
    if WIDE != DIM:
        inside = d < DIM
        mask = inside & mask
    x = tl.load(rows + d, mask=mask, other=0.0)
    y = tl.load(rows + partner, mask=mask, other=0.0)
    dtype = x.dtype
    if NORM:
        inverse = tl.rsqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) / DIM + eps)[:, None]
        if WIDE == DIM:
            x = apply_gain(x, inverse, tl.load(weight + d), PLUS_ONE)
            y = apply_gain(y, inverse, tl.load(weight + partner), PLUS_ONE)
        else:
            x = apply_gain(x, inverse, tl.load(weight + d, mask=inside, other=0.0), PLUS_ONE)
            y = apply_gain(y, inverse, tl.load(weight + partner, mask=inside, other=0.0), PLUS_ONE)
    if ROTARY == WIDE:
        straight = x.to(tl.float32) * tl.load(cos + d).to(tl.float32)
        turned = y.to(tl.float32) * sign * tl.load(sin + d).to(tl.float32)
    else:
        straight = x.to(tl.float32) * tl.load(cos + d, mask=d < ROTARY, other=1.0).to(tl.float32)
        turned = y.to(tl.float32) * sign * tl.load(sin + d, mask=d < ROTARY, other=0.0).to(tl.float32)
    return (straight.to(dtype).to(tl.float32) + turned.to(dtype).to(tl.float32)).to(dtype)


@jit
def store_output(acc, top, total, out, lse, rows, mask, DIM: tl.constexpr, WIDE: tl.constexpr, PARTIAL: tl.constexpr):
    """Write o = acc / l to the rows of `out`, and the base-2 log-sum-exp (−∞ where no key was seen) when partial."""
    d = tl.arange(0, WIDE)[None, :]
    some = total > 0.0
    safe = tl.where(some, total, 1.0)
    inside = mask[:, None]
    if WIDE != DIM:
        inside = inside & (d < DIM)
    tl.store(out + rows[:, None] * DIM + d, (acc / safe[:, None]).to(out.dtype.element_ty), mask=inside)
    if PARTIAL:
        tl.store(lse + rows, tl.where(some, top + tl.log2(safe), float("-inf")), mask=mask)


def contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with contiguous heads. Slices of a fused projection already are; transposed views are copied."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def padded_dim(dim: int) -> int:
    """Elements of a tile for a head of `dim` elements: a power of two, at least that of a matrix instruction."""
    return max(16, int(triton.next_power_of_2(dim)))


def score_constants(scale: float, softcap: float | None) -> tuple[float, float]:
    """(factor of q · k, CAP) for `scores_of`: base-2 scores, since cap · tanh(x) = cap · (1 − 2 / (e^2x + 1))."""
    return (scale * LOG2_E, 0.0) if softcap is None else (2.0 * LOG2_E * scale / softcap, LOG2_E * softcap)


def row_bytes(q: torch.Tensor) -> int:
    return padded_dim(q.shape[2]) * q.element_size()


def default_tiles(q: torch.Tensor, warps: int, large_warps: int) -> Tiles:
    """Tiles for heads of up to 256 bytes, and smaller ones with more warps for larger heads: otherwise a program would
    need more registers than there are."""
    if row_bytes(q) <= 256:
        return Tiles(warps=warps)
    return Tiles(keys=64 * 256 // row_bytes(q), warps=large_warps)


def default_rows(q: torch.Tensor, rows: int) -> int:
    """Rows of queries in a tile: fewer of large heads in fp32, whose products have no matrix instruction."""
    return min(rows, 32) if row_bytes(q) > 256 and q.element_size() > 2 else rows
