"""Causal prefill attention: chunks of prompts over a paged KV cache that already holds the earlier tokens.

    query i of a sequence (n queries in the chunk, c keys in the cache including the chunk's) sees keys 0 .. c − n + i,
    with a window only the last WINDOW of them

Each program processes a tile of queries of one head: full key tiles without a mask first, then those on the diagonal;
with a window, before them those where it begins.
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
    padded_dim,
    score_constants,
)
from toolwise.kernels.launch import jit


@jit
def _prefill(
    q, k_cache, v_cache, tables, starts, contexts, out, q_stride, table_stride, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Program (head, query tile, sequence)."""
    head, tile, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if tile * ROWS < count:
        row, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
        real = row < count
        inside = real[:, None]
        if WIDE != DIM:
            inside = inside & (d < DIM)[None, :]
        token = (start + row).to(tl.int64)
        mine = tl.load(q + token[:, None] * q_stride + head * DIM + d[None, :], mask=inside, other=0.0)
        before = tl.load(contexts + sequence) - count
        last = before + tl.minimum((tile + 1) * ROWS, count)
        whole = (before + tile * ROWS + 1) // KEYS * KEYS
        table = tables + sequence.to(tl.int64) * table_stride
        kv_head = head // GROUP
        acc = tl.zeros([ROWS, WIDE], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        begin = 0
        if WINDOW > 0:
            # From the first key that the first query sees to the tile after the first that the last query sees.
            first = tl.maximum(before + tile * ROWS + 1 - WINDOW, 0) // KEYS * KEYS
            begin = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW, 0), KEYS) * KEYS, whole)
            acc, top, total = attend(
                mine, acc, top, total, k_cache, v_cache, table, first, begin, before + row, kv_head, scale,
                KV_HEADS, DIM, WIDE, BLOCK, KEYS, False, WINDOW, CAP,
            )  # fmt: skip
        acc, top, total = attend(
            mine, acc, top, total, k_cache, v_cache, table, begin, whole, row, kv_head, scale,
            KV_HEADS, DIM, WIDE, BLOCK, KEYS, False, 0, CAP,
        )  # fmt: skip
        acc, top, total = attend(
            mine, acc, top, total, k_cache, v_cache, table, whole, last, before + row, kv_head, scale,
            KV_HEADS, DIM, WIDE, BLOCK, KEYS, True, WINDOW, CAP,
        )  # fmt: skip
        at = out + token[:, None] * (KV_HEADS * GROUP * DIM) + head * DIM + d[None, :]
        tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def paged_attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    scale: float,
    max_query_length: int | None = None,
    out: torch.Tensor | None = None,
    *,
    rows: int | None = None,
    tiles: Tiles | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of q[T, H, D], sequences concatenated at `query_starts[S+1]`, over `context_lengths[S]` keys.

    The chunk's own keys must already be in the cache and count towards its context length. A sequence may be empty.
    Pass `max_query_length` to keep the grid small: without it, it is sized for a sequence of T tokens.
    """
    tiles, q = tiles or default_tiles(q, 8, 8), contiguous_heads(q)
    tokens, heads, dim = q.shape
    longest = tokens if max_query_length is None else max_query_length
    block, kv_heads = k_cache.shape[1:3]
    rows = rows or default_rows(q, 128 if q.dtype != torch.float32 and longest > 64 else 64)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not tokens:
        return out
    factor, cap = score_constants(scale, softcap)
    _prefill[(heads, triton.cdiv(longest, rows), query_starts.shape[0] - 1)](
        q, k_cache, v_cache, block_tables, query_starts, context_lengths, out,
        q.stride(0), block_tables.stride(0), factor,
        kv_heads, heads // kv_heads, rows, dim, padded_dim(dim), block, tiles.keys, window or 0, cap,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
