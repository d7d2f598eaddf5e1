"""Reads the prompt of one request on a CPU: with no other request beside it, nothing needs to be grouped or padded.

For a small model, most of a short prompt's time goes into gathering keys and values layer by layer. Here those of all
layers are gathered at once, the forward pass extends them in place, and the new tokens are stored at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from toolwise.engine.cpu_forward import CpuForward, ropes_at
from toolwise.models.decoder_layers import Decoder

MAX_NEW_TOKENS, MAX_TOKENS = 128, 1024
"""Longer prompts are better read in chunks of similar length: here every new token has a mask over all tokens."""


def fits_prefill(start: int, count: int) -> bool:
    return count <= MAX_NEW_TOKENS and start + count <= MAX_TOKENS


def read_tokens(
    decoder: Decoder,
    model: CpuForward,
    cache: Tensor,
    table: list[int],
    tokens: list[int],
    start: int,
    heads: int,
    *,
    first: int,
) -> Tensor:
    """Hidden states of `tokens[first:]`, where those from `start` on are new. `cache` has the keys of each layer, then
    the values: [2 * layers, blocks, block size, key heads, head size]; `table` names the request's blocks."""
    layers, size, key_heads, width = len(cache) // 2, *cache.shape[2:]
    end, count, shared = len(tokens), len(tokens) - start, heads // key_heads
    blocks = table[: -(-end // size)]
    window = cache.index_select(1, torch.tensor(blocks)).flatten(1, 2)
    # Query heads that share a key head are laid out as additional queries.
    mask = torch.full((count, end), -torch.inf).triu_(start + 1).repeat(shared, 1, 1) if count > 1 else None

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        window[layer, start:end], window[layers + layer, start:end] = key, value
        k, v = window[layer, :end].transpose(0, 1)[None], window[layers + layer, :end].transpose(0, 1)[None]
        rows = len(query)  # fewer than `count` in the last layer
        seen = None if mask is None or rows == 1 else mask[:, count - rows :].flatten(0, 1)
        q = query.view(rows, key_heads, shared, width).permute(1, 2, 0, 3).reshape(1, key_heads, -1, width)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        return out.view(key_heads, shared, rows, width).permute(2, 0, 1, 3).reshape(rows, heads * width)

    ropes = ropes_at(decoder, torch.arange(start, end)[None])
    states = model.forward(torch.tensor(tokens[start:]), ropes, attend, needed=slice(first - start, None))
    for column in range(start // size, len(blocks)):  # a few slices take a tenth of the time of an index
        a, b = max(start, column * size), min(end, (column + 1) * size)
        cache[:, table[column], a - column * size : b - column * size] = window[:, a:b]
    return states
