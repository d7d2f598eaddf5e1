"""Decode attention for groups of requests that share their first blocks: shared keys are read once per group.

    o = merge(attention of the group's stacked queries over the shared blocks, attention of each over its own tail)

The queries of all members (times the heads of a key-value head) are rows of one program, so a prompt of P tokens
shared by n rollouts costs P reads instead of n·P; prefix and tail are merged exactly by log-sum-exp. With a sliding
window, the keys that any member still sees are read, and each row is masked to its own window.
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
    default_rows,
    default_tiles,
    load_rotated,
    padded_dim,
    row_bytes,
    score_constants,
    store_output,
)
from toolwise.kernels.decode_attention import decode_one, decode_part, merge_splits, splits_for
from toolwise.kernels.dependent_launch import dependent_launch, wait_for_inputs
from toolwise.kernels.launch import jit
from toolwise.kernels.new_tokens import NewTokens

MAX_ROWS = 64
MANY_TAILS = 1024
"""Tails × key-value heads from which small programs fill the GPU best. Fewer must each have more loads in flight."""


@jit
def _prefix_one(
    kv_head, tile, split, group, q, k_cache, v_cache, tables, lengths, tail_lengths, starts, members, out, lse, cos,
    sin, q_weight, q_stride, table_stride, scale, eps, slots_in_all,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    NEW: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """ROWS of the group's members × heads over one part of the prefix. NEW: also rotate the queries."""
    start = tl.load(starts + group)
    count = (tl.load(starts + group + 1) - start) * GROUP
    if tile * ROWS < count:
        row, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
        real = row < count
        request = tl.load(members + start + row // GROUP, mask=real, other=0).to(tl.int64)
        heads = kv_head * GROUP + row % GROUP
        at = q + (request * q_stride + heads * DIM)[:, None]
        if NEW:
            turn, lean = cos + (request * ROTARY)[:, None], sin + (request * ROTARY)[:, None]
            mine = load_rotated(at, turn, lean, q_weight, real[:, None], eps, DIM, WIDE, ROTARY, NORM, PLUS_ONE)
        elif WIDE == DIM:
            mine = tl.load(at + d[None, :], mask=real[:, None], other=0.0)
        else:
            mine = tl.load(at + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)
        length = tl.load(lengths + group)
        begin, limits = 0, row
        if WINDOW > 0:  # a query is the last key of its tail
            limits = length - 1 + tl.load(tail_lengths + request, mask=real, other=WINDOW)
            begin = tl.minimum(tl.maximum(tl.min(limits, 0) + 1 - WINDOW, 0), length) // BLOCK * BLOCK
        share = tl.cdiv(tl.cdiv(length - begin, KEYS), SPLITS) * KEYS
        first = begin + split * share
        last = tl.minimum(first + share, length)
        acc, top, total = attend(
            mine, tl.zeros([ROWS, WIDE], tl.float32), tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32), k_cache, v_cache, tables + group.to(tl.int64) * table_stride,
            first, last, limits, kv_head, scale, KV_HEADS, DIM, WIDE, BLOCK, KEYS, False, WINDOW, CAP,
        )  # fmt: skip
        rows = (request * slots_in_all + split) * (KV_HEADS * GROUP) + heads
        store_output(acc, top, total, out, lse, rows, real, DIM, WIDE, True)


@jit(do_not_specialize=["slots_in_all", "prefix_programs"])
def _prefixes_and_tails(
    q, k_cache, v_cache, prefix_tables, prefix_lengths, tail_tables, tail_lengths, starts, members, out, lse,
    new_k, new_v, cos, sin, slots, q_weight, k_weight,
    q_stride, kv_stride, prefix_table_stride, tail_table_stride, scale, eps, slots_in_all, prefix_programs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PREFIX_ROWS: tl.constexpr, ROW_TILES: tl.constexpr,
    TAIL_ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, TAIL_SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    NEW: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """The first `prefix_programs` programs take (kv head, row tile, split) of a group, the others (kv head, split) of a
    request's tail. In one launch they fill the GPU together; one after the other, each leaves a part of it idle."""
    program = tl.program_id(0)
    if program < prefix_programs:
        kv_head, rest = program % KV_HEADS, program // KV_HEADS
        split, rest = rest % SPLITS, rest // SPLITS
        _prefix_one(
            kv_head, rest % ROW_TILES, split, rest // ROW_TILES, q, k_cache, v_cache, prefix_tables, prefix_lengths,
            tail_lengths, starts, members, out, lse, cos, sin, q_weight, q_stride, prefix_table_stride, scale, eps,
            slots_in_all, KV_HEADS, GROUP, PREFIX_ROWS, DIM, WIDE, BLOCK, KEYS, SPLITS, WINDOW, CAP, NEW, ROTARY, NORM,
            PLUS_ONE,
        )  # fmt: skip
    else:
        program -= prefix_programs
        kv_head, rest = program % KV_HEADS, program // KV_HEADS
        decode_one(
            kv_head, rest % TAIL_SPLITS, rest // TAIL_SPLITS, q, k_cache, v_cache, tail_tables, tail_lengths, out, lse,
            new_k, new_v, cos, sin, slots, q_weight, k_weight, q_stride, kv_stride, tail_table_stride, scale, eps,
            SPLITS, slots_in_all, KV_HEADS, GROUP, TAIL_ROWS, DIM, WIDE, BLOCK, KEYS, TAIL_SPLITS, WINDOW, CAP, True,
            NEW, ROTARY, NORM, PLUS_ONE,
        )  # fmt: skip


@jit(do_not_specialize=["slots_in_all"])
def _prefixes(
    q, k_cache, v_cache, tables, lengths, tail_lengths, starts, members, out, lse, cos, sin, q_weight,
    q_stride, table_stride, scale, eps, slots_in_all,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ROW_TILES: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, NEW: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Program (kv head, split, row tile, group)."""
    wait_for_inputs(True)
    kv_head, rest = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    split, rest = rest % SPLITS, rest // SPLITS
    _prefix_one(
        kv_head, rest % ROW_TILES, split, rest // ROW_TILES, q, k_cache, v_cache, tables, lengths, tail_lengths, starts,
        members, out, lse, cos, sin, q_weight, q_stride, table_stride, scale, eps, slots_in_all, KV_HEADS, GROUP, ROWS,
        DIM, WIDE, BLOCK, KEYS, SPLITS, WINDOW, CAP, NEW, ROTARY, NORM, PLUS_ONE,
    )  # fmt: skip


@jit
def _tails(
    q, k_cache, v_cache, tables, lengths, parts, part_lse, out, new_k, new_v, cos, sin, slots, q_weight, k_weight,
    q_stride, kv_stride, table_stride, scale, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    NEW: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Program (kv head, request), launched while `_prefixes` still runs, which waited for everything that this reads
    first; its own results are waited for and merged at the end."""
    kv_head, request = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    acc, top, total = decode_part(
        kv_head, 0, request, q, k_cache, v_cache, tables, lengths, new_k, new_v, cos, sin, slots, q_weight, k_weight,
        q_stride, kv_stride, table_stride, scale, eps, KV_HEADS, GROUP, ROWS, DIM, WIDE, BLOCK, KEYS, 1, WINDOW, CAP,
        NEW, ROTARY, NORM, PLUS_ONE,
    )  # fmt: skip
    wait_for_inputs(True)
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    heads = kv_head * GROUP + row
    for part in tl.static_range(PARTS):
        rows = (request.to(tl.int64) * PARTS + part) * (KV_HEADS * GROUP) + heads
        lse = tl.load(part_lse + rows, mask=row < GROUP, other=float("-inf"))
        some = lse > float("-inf")
        inside = some[:, None]
        if WIDE != DIM:
            inside = inside & (d < DIM)[None, :]
        value = tl.load(parts + rows[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        higher = tl.maximum(top, lse)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(top - base), tl.exp2(lse - base)
        acc = acc * shrink[:, None] + value * weight[:, None]
        total, top = total * shrink + weight, higher
    rows = request.to(tl.int64) * (KV_HEADS * GROUP) + heads
    store_output(acc, top, total, out, out, rows, row < GROUP, DIM, WIDE, False)


def _programs(q: torch.Tensor, tails: int) -> tuple[Tiles, int]:
    """Tiles, and the number of programs that the prefixes are split into at least: few, since each of them has more to
    compute than a tail's, and every split is one more to merge. Measured on an H200 with heads of 64 in bf16."""
    if row_bytes(q) > 256:
        return default_tiles(q, 2, 8), 264
    return (Tiles(keys=32, warps=1), 264) if tails >= MANY_TAILS else (Tiles(keys=128, warps=4), 132)


def _apart(q: torch.Tensor) -> tuple[Tiles, Tiles] | None:
    """Tiles of prefixes and tails that are launched one after the other; None for heads that are too large for them.
    Measured on an H200 with heads of 64 in bf16."""
    if row_bytes(q) > 256:
        return None
    return Tiles(keys=128, warps=4, stages=2), Tiles(keys=32, warps=1)


def _most_keys(tables: torch.Tensor, block: int, window: int | None) -> int:
    return min(tables.shape[1] * block, window or tables.shape[1] * block)


def _partial_outputs(q: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, dim = q.shape
    parts = torch.empty(batch, slots, heads, dim, dtype=torch.float32, device=q.device)
    return parts, torch.empty(batch, slots, heads, dtype=torch.float32, device=q.device)


def shared_prefix_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix_tables: torch.Tensor,
    prefix_lengths: torch.Tensor,
    member_starts: torch.Tensor,
    members: torch.Tensor,
    max_members: int,
    tail_tables: torch.Tensor,
    tail_lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    tiles: Tiles | None = None,
    tail_splits: int | None = None,
    new: NewTokens | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """Attention of q[B, H, D]: request b of group g over the keys of prefix g, then those of its own tail; with `new`,
    also rope and the cache write, as in `paged_attention_decode`.

    Groups g = 0..G-1: blocks `prefix_tables[G, MAXP]`, `prefix_lengths[G]` keys, rows `members[starts[g]:starts[g+1]]`
    of the batch (int32). Every row of the batch must be a member exactly once; one that shares nothing goes into a
    group with prefix length 0. Unused groups at the end have equal starts. `max_members` bounds a group's size (grid).
    """
    q = contiguous_heads(q)
    batch, heads, dim = q.shape
    _, block, kv_heads, _ = k_cache.shape
    default, prefix_programs = _programs(q, batch * kv_heads)
    tiles, apart = tiles or default, _apart(q)
    groups, group = len(prefix_lengths), heads // kv_heads
    rows = min(default_rows(q, MAX_ROWS), max(16, triton.next_power_of_2(max_members * group)))
    row_tiles = triton.cdiv(max_members * group, rows)
    programs = groups * kv_heads * row_tiles
    splits = splits_for(programs, _most_keys(prefix_tables, block, window), tiles, prefix_programs)
    tails = tail_splits or splits_for(batch * kv_heads, _most_keys(tail_tables, block, window), tiles)
    n = new or NewTokens(q, q, q, q, tail_lengths)
    factor, cap = score_constants(scale, softcap)
    q_weight, k_weight = (q if weight is None else weight for weight in (n.q_weight, n.k_weight))
    tail_rows, wide = max(16, triton.next_power_of_2(group)), padded_dim(dim)
    formula = (window or 0, cap, new is not None, n.cos.shape[-1], n.q_weight is not None, n.plus_one)
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device) if out is None else out
    overlap = apart if tails == 1 and dependent_launch(q.device) else None
    parts, lse = _partial_outputs(q, splits + (0 if overlap else tails))
    if overlap is not None:
        of_prefixes, of_tails = overlap
        _prefixes[(programs * splits,)](
            q, k_cache, v_cache, prefix_tables, prefix_lengths, tail_lengths, member_starts, members, parts, lse, n.cos,
            n.sin, q_weight, q.stride(0), prefix_tables.stride(0), factor, n.eps, splits, kv_heads, group, rows,
            row_tiles, dim, wide, block, of_prefixes.keys, splits, *formula,
            num_warps=of_prefixes.warps, num_stages=of_prefixes.stages, launch_pdl=dependent,
        )  # fmt: skip
        _tails[(kv_heads * batch,)](
            q, k_cache, v_cache, tail_tables, tail_lengths, parts, lse, out, n.k, n.v, n.cos, n.sin, n.slots, q_weight,
            k_weight, q.stride(0), n.k.stride(0), tail_tables.stride(0), factor, n.eps, kv_heads, group, tail_rows, dim,
            wide, block, of_tails.keys, splits, *formula,
            num_warps=of_tails.warps, num_stages=of_tails.stages, launch_pdl=True,
        )  # fmt: skip
        return out
    _prefixes_and_tails[(programs * splits + kv_heads * tails * batch,)](
        q, k_cache, v_cache, prefix_tables, prefix_lengths, tail_tables, tail_lengths, member_starts, members, parts,
        lse, n.k, n.v, n.cos, n.sin, n.slots, q_weight, k_weight, q.stride(0), n.k.stride(0), prefix_tables.stride(0),
        tail_tables.stride(0), factor, n.eps, splits + tails, programs * splits,
        kv_heads, group, rows, row_tiles, tail_rows, dim, wide, block, tiles.keys, splits, tails, *formula,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return merge_splits(parts, lse, out)
