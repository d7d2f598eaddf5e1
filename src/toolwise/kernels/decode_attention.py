"""Flash-decoding: grouped-query attention of one new token per request over a paged KV cache.

    o = softmax(q Kᵀ · scale) V, one pass over the keys with a running maximum m and sum l:
    m' = max(m, s),  l' = l·2^(m−m') + 2^(s−m'),  o' = o·2^(m−m') + 2^(s−m')·v

A decode step is limited by reading the cache, so the query heads of one key-value head are rows of one program (padded
to the 16 rows of a matrix instruction) and share its loads. If requests × heads are too few programs to fill the GPU,
the keys are split and the parts merged by their log-sum-exp: o = Σ 2^(lse_i − lse) o_i. Lengths are read on the device
and grids depend on shapes alone, so every launch can be captured in a CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.attention_parts import (
    Tiles,
    attend,
    contiguous_heads,
    default_tiles,
    load_rotated,
    padded_dim,
    row_bytes,
    score_constants,
    scores_of,
    store_output,
)
from toolwise.kernels.dependent_launch import dependent_launch, wait_for_inputs
from toolwise.kernels.launch import jit
from toolwise.kernels.new_tokens import NewTokens

TARGET_PROGRAMS = 528
"""Four for each of an H200's 132 multiprocessors: enough loads in flight to fill its memory bus."""
MAX_SPLITS = 32


@jit
def decode_part(
    kv_head, split, request, q, k_cache, v_cache, tables, lengths, new_k, new_v, cos, sin, slots, q_weight, k_weight,
    q_stride, kv_stride, table_stride, scale, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    NEW: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Running softmax (acc, top, total) of one split of one request's keys. NEW: also rotate q and the new key, and
    write the token to the cache."""
    request = request.to(tl.int64)
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    heads = kv_head * GROUP + row
    real = row < GROUP
    at = q + request * q_stride + heads[:, None] * DIM
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    length = tl.load(lengths + request)
    begin, limits = 0, row
    if WINDOW > 0:  # from a whole block: an odd start would cost registers
        begin = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
        limits = tl.zeros([ROWS], tl.int32) + (length - 1)
    if NEW:
        turn, lean = cos + request * ROTARY, sin + request * ROTARY
        mine = load_rotated(at, turn, lean, q_weight, real[:, None], eps, DIM, WIDE, ROTARY, NORM, PLUS_ONE)
        length = tl.maximum(length - 1, 0)
        if split == 0:
            source = request * kv_stride + kv_head * DIM
            key = load_rotated(
                new_k + source + tl.zeros([1, 1], tl.int64), turn, lean, k_weight, True, eps,
                DIM, WIDE, ROTARY, NORM, PLUS_ONE,
            )  # fmt: skip
            if WIDE == DIM:
                value = tl.load(new_v + source + d)[None, :]
            else:
                value = tl.load(new_v + source + d, mask=d < DIM, other=0.0)[None, :]
            slot = tl.load(slots + request)
            target = (slot * KV_HEADS + kv_head) * DIM + d[None, :]
            written = slot >= 0
            if WIDE != DIM:
                written = written & (d < DIM)[None, :]
            tl.store(k_cache + target, key, mask=written)
            tl.store(v_cache + target, value, mask=written)
            # The new token starts the running softmax; it is not read back from the cache.
            top = scores_of(tl.sum(mine.to(tl.float32) * key.to(tl.float32), 1), scale, CAP)
            total += 1.0
            acc += value.to(tl.float32)
    elif WIDE == DIM:
        mine = tl.load(at + d[None, :], mask=real[:, None], other=0.0)
    else:
        mine = tl.load(at + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)
    share = tl.cdiv(tl.cdiv(length - begin, KEYS), SPLITS) * KEYS
    first = begin + split * share
    last = tl.minimum(first + share, length)
    acc, top, total = attend(
        mine, acc, top, total, k_cache, v_cache, tables + request * table_stride, first, last, limits, kv_head, scale,
        KV_HEADS, DIM, WIDE, BLOCK, KEYS, False, WINDOW, CAP,
    )  # fmt: skip
    return acc, top, total


@jit
def decode_one(
    kv_head, split, request, q, k_cache, v_cache, tables, lengths, out, lse, new_k, new_v, cos, sin, slots, q_weight,
    k_weight, q_stride, kv_stride, table_stride, scale, eps, slot_at, slots_in_all,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    PARTIAL: tl.constexpr, NEW: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """`decode_part`, written to its slot of `out`."""
    acc, top, total = decode_part(
        kv_head, split, request, q, k_cache, v_cache, tables, lengths, new_k, new_v, cos, sin, slots, q_weight,
        k_weight, q_stride, kv_stride, table_stride, scale, eps, KV_HEADS, GROUP, ROWS, DIM, WIDE, BLOCK, KEYS, SPLITS,
        WINDOW, CAP, NEW, ROTARY, NORM, PLUS_ONE,
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    rows = (request.to(tl.int64) * slots_in_all + slot_at + split) * (KV_HEADS * GROUP) + kv_head * GROUP + row
    store_output(acc, top, total, out, lse, rows, row < GROUP, DIM, WIDE, PARTIAL)


@jit(do_not_specialize=["slot_at", "slots_in_all"])
def _decode(
    q, k_cache, v_cache, tables, lengths, out, lse, new_k, new_v, cos, sin, slots, q_weight, k_weight,
    q_stride, kv_stride, table_stride, scale, eps, slot_at, slots_in_all,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    PARTIAL: tl.constexpr, NEW: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (kv head, split, request)."""
    wait_for_inputs(PDL)
    decode_one(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), q, k_cache, v_cache, tables, lengths, out, lse, new_k,
        new_v, cos, sin, slots, q_weight, k_weight, q_stride, kv_stride, table_stride, scale, eps, slot_at,
        slots_in_all, KV_HEADS, GROUP, ROWS, DIM, WIDE, BLOCK, KEYS, SPLITS, WINDOW, CAP, PARTIAL, NEW, ROTARY, NORM,
        PLUS_ONE,
    )  # fmt: skip


@jit
def _merge_splits(
    parts, lse, out, HEADS: tl.constexpr, SLOTS: tl.constexpr, SLOTS_PADDED: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (head, request): o = Σ 2^(lse_i − max) o_i / Σ 2^(lse_i − max); zero where no slot saw a key."""
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, d = tl.arange(0, SLOTS_PADDED), tl.arange(0, WIDE)
    rows = (request * SLOTS + slot) * HEADS + head
    part_lse = tl.load(lse + rows, mask=slot < SLOTS, other=float("-inf"))
    top = tl.max(part_lse, 0)
    weight = tl.where(part_lse == float("-inf"), 0.0, tl.exp2(part_lse - top))
    inside = (weight > 0.0)[:, None]
    if WIDE != DIM:
        inside = inside & (d < DIM)[None, :]
    part = tl.load(parts + rows[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    mass = tl.sum(weight, 0)
    merged = tl.sum(part * weight[:, None], 0) / tl.where(mass > 0.0, mass, 1.0)
    at = out + (request * HEADS + head) * DIM + d
    if WIDE == DIM:
        tl.store(at, merged.to(out.dtype.element_ty))
    else:
        tl.store(at, merged.to(out.dtype.element_ty), mask=d < DIM)


def _tiles(q: torch.Tensor, programs: int) -> Tiles:
    """Programs of one warp with many loads in flight where there are enough of them to fill the GPU, else larger ones.
    Measured on an H200 with heads of 64 in bf16."""
    if row_bytes(q) > 128 or programs < TARGET_PROGRAMS:
        return default_tiles(q, 2, 4)
    return Tiles(keys=32, warps=1, stages=6 if programs < 2 * TARGET_PROGRAMS else 4)


def splits_for(programs: int, most_keys: int, tiles: Tiles, wanted: int = TARGET_PROGRAMS) -> int:
    """The number of splits (a power of two) that fills the GPU, with at least one tile of keys each."""
    splits = 1
    while programs * splits < wanted and splits < MAX_SPLITS and splits * tiles.keys < most_keys:
        splits *= 2
    return splits


def merge_splits(parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Merge partial outputs [B, slots, H, D] with log-sum-exps [B, slots, H] into `out` [B, H, D]."""
    batch, slots, heads, dim = parts.shape
    padded = triton.next_power_of_2(slots)
    _merge_splits[(heads, batch)](
        parts, lse, out, heads, slots, padded, dim, padded_dim(dim), num_warps=1 if padded <= 8 else 4
    )
    return out


def decode_into(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor,
    scale: float, out: torch.Tensor, lse: torch.Tensor | None, slot_at: int, splits: int, tiles: Tiles,
    new: NewTokens | None, window: int | None, softcap: float | None, dependent: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel: final outputs into [B, H, D], or partial ones into [B, slots, H, D] if `lse` is given."""
    batch, heads, dim = q.shape
    _, block, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    n = new or NewTokens(q, q, q, q, lengths)
    factor, cap = score_constants(scale, softcap)
    pdl = dependent and dependent_launch(q.device)
    _decode[(kv_heads, splits, batch)](
        q, k_cache, v_cache, tables, lengths, out, out if lse is None else lse, n.k, n.v, n.cos, n.sin, n.slots,
        q if n.q_weight is None else n.q_weight, q if n.k_weight is None else n.k_weight,
        q.stride(0), n.k.stride(0), tables.stride(0), factor, n.eps, slot_at,
        1 if lse is None else out.shape[1],
        kv_heads, group, max(16, triton.next_power_of_2(group)), dim, padded_dim(dim), block, tiles.keys, splits,
        window or 0, cap, lse is not None, new is not None, n.cos.shape[-1], n.q_weight is not None, n.plus_one, pdl,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    tiles: Tiles | None = None,
    new: NewTokens | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """Attention of q[B, H, D] over each request's first `lengths` keys; with `new`, also rope and the cache write.

    With a `window`, over the last `window` of them. `dependent`: launched ahead (`dependent_launch.py`). Fixing
    `splits` makes a request's result bitwise independent of the batch size.
    """
    q = contiguous_heads(q)
    batch, heads, dim = q.shape
    block, kv_heads = k_cache.shape[1:3]
    tiles = tiles or _tiles(q, batch * kv_heads)
    most_keys = block_tables.shape[1] * block
    splits = splits or splits_for(batch * kv_heads, min(most_keys, window or most_keys), tiles)
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device) if out is None else out
    if splits == 1:
        decode_into(
            q, k_cache, v_cache, block_tables, lengths, scale, out, None, 0, 1, tiles, new, window, softcap, dependent
        )
        return out
    parts = torch.empty(batch, splits, heads, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, splits, heads, dtype=torch.float32, device=q.device)
    decode_into(
        q, k_cache, v_cache, block_tables, lengths, scale, parts, lse, 0, splits, tiles, new, window, softcap, dependent
    )
    return merge_splits(parts, lse, out)
