"""Causal prefill attention: chunks of prompts over a paged KV cache that already holds the earlier tokens.

    query i of a sequence (n queries in the chunk, c keys in the cache including the chunk's) sees keys 0 .. c − n + i

Each program processes a tile of queries of one head: full key tiles without a mask first, then those on the diagonal.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.decode_attention import LOG2_E, Tiles, attend, contiguous_heads


@triton.jit
def _prefill(
    q, k_cache, v_cache, tables, starts, contexts, out, q_stride, table_stride, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Program (head, query tile, sequence)."""
    head, tile, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if tile * ROWS < count:
        row, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
        real = row < count
        token = (start + row).to(tl.int64)
        mine = tl.load(q + token[:, None] * q_stride + head * DIM + d[None, :], mask=real[:, None], other=0.0)
        before = tl.load(contexts + sequence) - count
        last = before + tl.minimum((tile + 1) * ROWS, count)
        whole = (before + tile * ROWS + 1) // KEYS * KEYS
        table = tables + sequence.to(tl.int64) * table_stride
        kv_head = head // GROUP
        acc = tl.zeros([ROWS, DIM], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc, top, total = attend(
            mine, acc, top, total, k_cache, v_cache, table, 0, whole, row, kv_head, scale,
            KV_HEADS, DIM, BLOCK, KEYS, False,
        )  # fmt: skip
        acc, top, total = attend(
            mine, acc, top, total, k_cache, v_cache, table, whole, last, before + row, kv_head, scale,
            KV_HEADS, DIM, BLOCK, KEYS, True,
        )  # fmt: skip
        at = out + token[:, None] * (KV_HEADS * GROUP * DIM) + head * DIM + d[None, :]
        tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


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
) -> torch.Tensor:
    """Attention of q[T, H, D], sequences concatenated at `query_starts[S+1]`, over `context_lengths[S]` keys.

    The chunk's own keys must already be in the cache and count towards its context length. A sequence may be empty.
    Pass `max_query_length` to keep the grid small: without it, it is sized for a sequence of T tokens.
    """
    tiles, q = tiles or Tiles(keys=64, warps=8, stages=3), contiguous_heads(q)
    tokens, heads, dim = q.shape
    longest = tokens if max_query_length is None else max_query_length
    block, kv_heads = k_cache.shape[1:3]
    rows = rows or (128 if q.dtype != torch.float32 and longest > 64 else 64)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not tokens:
        return out
    _prefill[(heads, triton.cdiv(longest, rows), query_starts.shape[0] - 1)](
        q, k_cache, v_cache, block_tables, query_starts, context_lengths, out,
        q.stride(0), block_tables.stride(0), scale * LOG2_E,
        kv_heads, heads // kv_heads, rows, dim, block, tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
