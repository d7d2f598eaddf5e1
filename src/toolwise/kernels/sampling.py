"""Samples the next token of every request, with its log-prob, in two launches over the logits.

    p = softmax(logits / T) in fp32; u = splitmix64(seed, position) in [0, 1); token = first i with Σ_{j≤i} p_j > u·Σp

The first launch computes each vocabulary tile's maximum, its index and Σ exp; the second, one program per request, adds
the tiles in order, finds the one that u falls into and then the token inside it, with sums in fp64. Rows are
independent, so a request's token depends only on its logits, seed and position.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.launch import jit

TILE = 2048


@jit
def uniform(seed, position):
    """`toolwise.policies.transformers_generation.uniforms` on the device: splitmix64, applied twice."""
    state = seed.to(tl.uint64) + 0x9E3779B97F4A7C15
    state = mix64(state)
    state = mix64(state ^ ((position.to(tl.uint64) + 1) * 0xD1342543DE82EF95))
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def _tile_stats(
    logits, temperatures, tops, argmaxes, sums, stride, VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr
):
    """Program (tile, request): the tile's maximum after temperature, its first index, and Σ exp(x − maximum)."""
    tile, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + request * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperatures + request)
    top = tl.max(x, 0)
    # A tile of only −∞ must sum to 0, not NaN.
    total = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0)
    tl.store(tops + request * TILES + tile, top)
    tl.store(argmaxes + request * TILES + tile, tile * TILE + tl.argmax(x, 0))
    tl.store(sums + request * TILES + tile, total)


@jit
def _draw(
    logits, temperatures, seeds, positions, greedy, tops, argmaxes, sums, tokens, logprobs, stride,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILES_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (request)."""
    request = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TILES_PADDED)
    part_top = tl.load(tops + request * TILES + t, mask=t < TILES, other=float("-inf"))
    part_sum = tl.load(sums + request * TILES + t, mask=t < TILES, other=0.0).to(tl.float64)
    top = tl.max(part_top, 0)
    mass = tl.where(part_top == float("-inf"), part_sum, part_sum * tl.exp(part_top - top).to(tl.float64))
    through = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    goal = uniform(tl.load(seeds + request), tl.load(positions + request)) * total
    chosen = tl.min(tl.where((through > goal) & (mass > 0.0), t, TILES_PADDED), 0)
    # Rounding can put goal at the very end: then take the last tile with any mass.
    chosen = tl.where(chosen == TILES_PADDED, tl.maximum(tl.max(tl.where(mass > 0.0, t, 0), 0), 0), chosen)
    before = tl.sum(tl.where(t < chosen, mass, 0.0), 0)
    temperature = tl.load(temperatures + request)
    i = tl.arange(0, TILE)
    at = chosen * TILE + i
    x = tl.load(logits + request * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32) / temperature
    p = tl.exp(x - top).to(tl.float64)
    inside = tl.min(tl.where((before + tl.cumsum(p, 0) > goal) & (p > 0.0), i, TILE), 0)
    inside = tl.where(inside == TILE, tl.max(tl.where(p > 0.0, i, 0), 0), inside)
    drawn = chosen * TILE + inside
    best = tl.min(
        tl.where(t == tl.argmax(part_top, 0), tl.load(argmaxes + request * TILES + t, mask=t < TILES), VOCAB), 0
    )
    token = tl.where(tl.load(greedy + request) != 0, best, drawn)
    mine = tl.load(logits + request * stride + token).to(tl.float32) / temperature
    tl.store(tokens + request, token.to(tl.int64))
    tl.store(logprobs + request, ((mine - top).to(tl.float64) - tl.log(total)).to(tl.float32))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row of logits[B, V] and its log-prob after temperature; sampled by (seed, position), or greedy.

    Returns tokens int64 [B] and log-probs fp32 [B] (NaN if the logits contain NaN). `seeds` holds 64 bits as int64.
    """
    batch, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    tops = torch.empty(batch, tiles, dtype=torch.float32, device=logits.device)
    argmaxes = torch.empty(batch, tiles, dtype=torch.int32, device=logits.device)
    sums = torch.empty(batch, tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=logits.device)
    _tile_stats[(tiles, batch)](
        logits, temperatures, tops, argmaxes, sums, logits.stride(0), vocab, tiles, TILE, num_warps=4
    )
    _draw[(batch,)](
        logits, temperatures, seeds, positions, greedy, tops, argmaxes, sums, tokens, logprobs, logits.stride(0),
        vocab, tiles, triton.next_power_of_2(tiles), TILE, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs
