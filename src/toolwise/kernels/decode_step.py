"""What a decode step does beside the model, in one launch before it and one after: positions, cache slots, stop tokens.

Each step feeds the next on the device (`engine/cuda_graphs.py`); in plain torch that takes some thirty launches.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.launch import jit

ROWS = 128


@jit
def _begin(
    positions, prefix, active, tables, slots, lengths, rows, table_stride,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    position = tl.load(positions + row, mask=inside, other=0)
    offset = position - tl.load(prefix + row, mask=inside, other=0)
    alive = inside & (tl.load(active + row, mask=inside, other=0) > 0)
    block = tl.load(tables + row.to(tl.int64) * table_stride + offset // BLOCK, mask=alive, other=0).to(tl.int64)
    tl.store(slots + row, tl.where(alive, block * BLOCK + position % BLOCK, -1), mask=inside)
    tl.store(lengths + row, tl.where(alive, offset + 1, 0).to(tl.int32), mask=inside)


@jit
def _end(
    tokens, logprobs, stops, ids, positions, sampled, limits, active, step, all_tokens, all_logprobs, rows, stride,
    STOPS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program for all rows, so that none still reads the number of the step that it counts up."""
    row = tl.arange(0, PADDED)
    inside = row < rows
    now = tl.load(step)
    token = tl.load(tokens + row, mask=inside, other=0)
    alive = inside & (tl.load(active + row, mask=inside, other=0) > 0)
    tl.store(all_tokens + now * stride + row, tl.where(alive, token, -1), mask=inside)
    tl.store(all_logprobs + now * stride + row, tl.load(logprobs + row, mask=inside, other=0.0), mask=inside)
    count = tl.load(sampled + row, mask=inside, other=0) + 1
    going_on = alive & (count < tl.load(limits + row, mask=inside, other=0))
    for index in tl.static_range(STOPS):
        going_on = going_on & (token != tl.load(stops + row * STOPS + index, mask=inside, other=-1))
    position = tl.load(positions + row, mask=inside, other=0)
    tl.debug_barrier()
    tl.store(ids + row, token, mask=alive)
    tl.store(sampled + row, count, mask=alive)
    tl.store(positions + row, position + 1, mask=alive)
    tl.store(active + row, going_on.to(tl.int64), mask=inside)
    tl.store(step, now + 1)


def begin_step(
    positions: torch.Tensor, prefix: torch.Tensor, active: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots int64 [B], lengths int32 [B]) of the new tokens at `positions`, in tables of what follows the first
    `prefix` tokens; −1 and 0 for rows that are not active. The fields are int64 [B]."""
    rows = len(positions)
    slots = torch.empty(rows, dtype=torch.int64, device=positions.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=positions.device)
    _begin[(triton.cdiv(rows, ROWS),)](
        positions, prefix, active, tables, slots, lengths, rows, tables.stride(0), block_size, ROWS,
    )  # fmt: skip
    return slots, lengths


def end_step(
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    stops: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    limits: torch.Tensor,
    active: torch.Tensor,
    step: torch.Tensor,
    all_tokens: torch.Tensor,
    all_logprobs: torch.Tensor,
) -> None:
    """Write the sampled tokens [B] (−1 where a row is not active) and log-probs to row `step` of `all_tokens` and
    `all_logprobs`, move active rows on, and end those that sampled one of their `stops` [B, S] or reached their limit.
    """
    rows = len(tokens)
    _end[(1,)](
        tokens, logprobs, stops, ids, positions, sampled, limits, active, step, all_tokens, all_logprobs, rows,
        all_tokens.stride(0),
        stops.shape[1], triton.next_power_of_2(rows), num_warps=8,
    )  # fmt: skip
