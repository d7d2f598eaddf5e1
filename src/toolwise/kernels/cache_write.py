"""Writes keys and values to the paged KV cache, alone or fused with rope and a norm of each head.

    slot = block · block_size + offset;  rope: x' = x·cos + rotate_half(x)·sin, rounded as in transformers

Slot −1 marks a padding row, which is not written.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.attention_parts import contiguous_heads, load_rotated, padded_dim
from toolwise.kernels.launch import jit


@jit
def _store(k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    at = tl.arange(0, PADDED)
    if slot >= 0:
        inside = at < WIDTH
        tl.store(k_cache + slot * WIDTH + at, tl.load(k + token * k_stride + at, mask=inside), mask=inside)
        tl.store(v_cache + slot * WIDTH + at, tl.load(v + token * v_stride + at, mask=inside), mask=inside)


@jit
def _rope_and_store(
    q, k, v, cos, sin, k_cache, v_cache, slots, q_weight, k_weight, q_stride, k_stride, v_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, KV_PADDED: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    d = tl.arange(0, WIDE)[None, :]
    turn, lean = cos + token * ROTARY, sin + token * ROTARY
    head = tl.arange(0, HEADS_PADDED)[:, None]
    kv_head = tl.arange(0, KV_PADDED)[:, None]
    real, kv_real = head < HEADS, kv_head < KV_HEADS
    q_at, k_at = q + token * q_stride + head * DIM, k + token * k_stride + kv_head * DIM
    query = load_rotated(q_at, turn, lean, q_weight, real, eps, DIM, WIDE, ROTARY, NORM, PLUS_ONE)
    key = load_rotated(k_at, turn, lean, k_weight, kv_real, eps, DIM, WIDE, ROTARY, NORM, PLUS_ONE)
    if WIDE != DIM:
        real, kv_real = real & (d < DIM), kv_real & (d < DIM)
    value = tl.load(v + token * v_stride + kv_head * DIM + d, mask=kv_real, other=0.0)
    # All threads must have read both halves of a vector before any overwrites them.
    tl.debug_barrier()
    tl.store(q_at + d, query, mask=real)
    tl.store(k_at + d, key, mask=kv_real)
    target = (slot * KV_HEADS + kv_head) * DIM + d
    tl.store(k_cache + target, key, mask=kv_real & (slot >= 0))
    tl.store(v_cache + target, value, mask=kv_real & (slot >= 0))


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write k, v [T, KVH, D] to `slots` [T] of the caches [NB, BS, KVH, D]."""
    k, v = contiguous_heads(k), contiguous_heads(v)
    tokens, kv_heads, dim = k.shape
    if tokens:
        padded = triton.next_power_of_2(kv_heads * dim)
        _store[(tokens,)](
            k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), kv_heads * dim, padded,
            num_warps=min(4, max(1, padded // 256)),
        )  # fmt: skip


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
) -> None:
    """Rotate the first R elements of q [T, H, D] and k [T, KVH, D] in place by cos, sin [T, R], and write k, v to the
    caches.

    With `q_weight` and `k_weight` [D], each head is RMS-normalised first (Qwen3), by 1 + weight with `plus_one`
    (Gemma 3). Rows may be slices of one tensor.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    if tokens:
        _rope_and_store[(tokens,)](
            q, k, v, cos, sin, k_cache, v_cache, slots,
            q if q_weight is None else q_weight, k if k_weight is None else k_weight,
            q.stride(0), k.stride(0), v.stride(0), eps,
            heads, kv_heads, triton.next_power_of_2(heads), triton.next_power_of_2(kv_heads), dim, padded_dim(dim),
            cos.shape[-1], q_weight is not None, plus_one, num_warps=4 if heads * dim > 512 else 2,
        )  # fmt: skip
