"""Attention over the paged KV cache, registered with transformers' attention interface as "toolwise_paged".

All requests are concatenated in one row. Their keys and values are first written to the batch's slots; each request
then attends to its own blocks: in Triton kernels on a GPU, in groups of similar length on a CPU and for models that the
kernels do not support (`fits_attention_kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from toolwise.engine.length_groups import Group, KeyView
from toolwise.errors import ModelError
from toolwise.kernels import MAX_HEAD_SIZE
from toolwise.models.attention_layers import attention_layers
from toolwise.models.dense_attention import AttentionLayer, dense_attention

ATTENTION_NAME = "toolwise_paged"
QUERY_CHUNK = 256
"""Queries whose scores are in memory at a time, for layers with soft caps or sinks."""


class Scratch:
    """A buffer reused by all layers: the OS would provide fresh memory page by page, which takes several times as long
    as filling it."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def reserve(self, size: int, like: Tensor) -> Tensor:
        if self._held is None or len(self._held) < size or self._held.dtype != like.dtype:
            self._held = torch.empty(size + size // 4, dtype=like.dtype, device=like.device)
        return self._held[:size]


@dataclass(slots=True)
class PagedContext:
    """What attention needs to know about a batch: where tokens are written and what each chunk may see."""

    keys: list[Tensor]
    values: list[Tensor]
    """The cache, per layer [blocks, block size, heads, head size]."""
    slots: Tensor
    """[T] int64: block * block size + offset."""
    block_tables: Tensor | None = None
    """[chunks, columns] int32, for the kernels."""
    query_starts: Tensor | None = None
    """[chunks + 1] int32"""
    context_lengths: Tensor | None = None
    """[chunks] int32: keys that the last query of each chunk sees, including itself."""
    max_query_length: int = 0
    """Tokens of the longest chunk."""
    decoding: bool = False
    """Every chunk is one token."""
    groups: list[Group] = field(default_factory=list)
    scratch: tuple[Scratch, Scratch] = field(default_factory=lambda: (Scratch(), Scratch()))
    """Buffers for the gathered keys and values of a group."""
    windows: Sequence[int | None] = ()
    """Sliding window of each layer; empty if none has one."""
    calls: int = 0
    """Calls by attention layers: a layer that does not call did not use the paged cache."""


@dataclass(frozen=True, slots=True)
class Formula:
    """One layer's attention: softmax(q kᵀ · scale) v, with what differs from it."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def needs_mask(self, group: Group) -> bool:
        """Whether the group's keys need an explicit mask: plain attention has a faster way."""
        return self.softcap is not None or self.sinks is not None or (self.window or group.keys) < group.keys


def supports_paged_attention(model: Any) -> bool:
    """Whether each layer is causal attention, possibly within a window, through the attention interface."""
    return attention_layers(model).problem is None


def fits_attention_kernels(layer: AttentionLayer) -> bool:
    """Whether the Triton kernels compute this layer's attention."""
    return not layer.sinks and layer.key_size == layer.value_size <= MAX_HEAD_SIZE


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    toolwise_paged: PagedContext | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, heads, T, size] in, [1, T, heads, size] out, the signature of attention functions in transformers."""
    context = toolwise_paged
    if context is None or others.get("position_bias") is not None:
        raise ModelError(
            f"{type(module).__name__} uses attention that the paged cache does not support: "
            'set rollout.engine = "transformers"'
        )
    context.calls += 1
    index = module.layer_idx
    keys, values = context.keys[index], context.values[index]
    query, key, value = (states[0].transpose(0, 1).to(keys.dtype) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    formula = Formula(scale, context.windows[index] if context.windows else None, softcap or None, s_aux)
    if context.block_tables is not None:
        return _attend_with_kernels(query, key, value, keys, values, context, formula)[None], None
    return attend_in_groups(query, key, value, keys, values, context, formula)[None], None


def attend_in_groups(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, context: PagedContext, formula: Formula
) -> Tensor:
    """[T, heads, size] in and out; `keys` and `values` are the layer's cache."""
    real = len(context.slots)
    keys.flatten(0, 1).index_copy_(0, context.slots, key[:real])
    values.flatten(0, 1).index_copy_(0, context.slots, value[:real])
    outs = [
        _attend_group(query[group.tokens], keys, values, group, formula, context.scratch) for group in context.groups
    ]
    if real < len(query):
        outs.append(query.new_zeros(len(query) - real, query.shape[1], value.shape[2]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_with_kernels(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, context: PagedContext, formula: Formula
) -> Tensor:
    """Rows that pad the batch to a fixed size have no slot, table or length: the kernels would read past the end of
    those."""
    from toolwise import kernels

    real, rows = len(context.slots), len(query)
    query, key, value = query[:real], key[:real], value[:real]
    kernels.store_kv(key, value, keys, values, context.slots)
    tables, lengths, starts = context.block_tables, context.context_lengths, context.query_starts
    assert tables is not None
    assert lengths is not None
    assert starts is not None
    odd: dict[str, Any] = {"window": formula.window, "softcap": formula.softcap}
    if context.decoding:
        out: Tensor = kernels.paged_attention_decode(query, keys, values, tables, lengths, formula.scale, **odd)
    else:
        out = kernels.paged_attention_prefill(
            query, keys, values, tables, starts, lengths, formula.scale, context.max_query_length, **odd
        )
    return out if real == rows else torch.cat([out, out.new_zeros(rows - real, *out.shape[1:])])


def _attend_group(
    query: Tensor, keys: Tensor, values: Tensor, group: Group, formula: Formula, scratch: tuple[Scratch, Scratch]
) -> Tensor:
    """[tokens of the group, heads, size]"""
    if group.padded is not None:
        query = query[group.padded]
    q = query.view(group.rows, group.queries, *query.shape[1:])
    ratio = query.shape[1] // keys.shape[2]
    if formula.needs_mask(group) or (group.mask is not None and group.mask.shape[2] != ratio * group.queries):
        out = _attend_with_mask(q, keys, values, group.view(formula.window, q.dtype), formula, scratch)
    else:
        out = _attend_plainly(q, keys, values, group, formula.scale, scratch)
    out = out.reshape(group.rows * group.queries, query.shape[1], values.shape[3])
    return out if group.real is None else out[group.real]


def _attend_plainly(
    query: Tensor, keys: Tensor, values: Tensor, group: Group, scale: float, scratch: tuple[Scratch, Scratch]
) -> Tensor:
    """[rows, queries, heads, size] in and out, over all keys before a query."""
    heads, size = query.shape[2:]
    key_heads = keys.shape[2]
    k, v = (
        _gather_blocks(cached, group.blocks, group.rows, group.keys, buffer)
        for cached, buffer in zip((keys, values), scratch, strict=True)
    )
    # Query heads that share a key head become additional queries: nothing is repeated.
    q = query.view(group.rows, group.queries, key_heads, heads // key_heads, size).permute(0, 2, 3, 1, 4)
    if group.causal:
        out = scaled_dot_product_attention(
            q.flatten(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=heads != key_heads
        )
        return out.transpose(1, 2)
    out = scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=group.mask, scale=scale)
    return out.view(group.rows, key_heads, heads // key_heads, group.queries, -1).permute(0, 3, 1, 2, 4)


def _attend_with_mask(
    query: Tensor, keys: Tensor, values: Tensor, view: KeyView, formula: Formula, scratch: tuple[Scratch, Scratch]
) -> Tensor:
    """The same for windows, soft caps and sinks; some queries at a time where scores are kept in memory."""
    q, gqa = query.transpose(1, 2), query.shape[2] != keys.shape[2]
    k, v = (
        _gather_blocks(cached, view.blocks, len(query), view.keys, buffer)
        for cached, buffer in zip((keys, values), scratch, strict=True)
    )
    if formula.softcap is None and formula.sinks is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=view.mask, scale=formula.scale, enable_gqa=gqa)
        return out.transpose(1, 2)
    outs = [
        dense_attention(
            q[:, :, first : first + QUERY_CHUNK], k, v, view.mask[:, :, first : first + QUERY_CHUNK],
            scale=formula.scale, softcap=formula.softcap, sinks=formula.sinks,
        )
        for first in range(0, q.shape[2], QUERY_CHUNK)
    ]  # fmt: skip
    return torch.cat(outs, 2).transpose(1, 2)


def _gather_blocks(cached: Tensor, blocks: Tensor, rows: int, keys: int, scratch: Scratch) -> Tensor:
    """[rows, key heads, keys, size]: gathers whole blocks, at the speed of a memory copy."""
    sources = cached.flatten(1)
    out = scratch.reserve(len(blocks) * sources.shape[1], sources).view(-1, sources.shape[1])
    torch.index_select(sources, 0, blocks, out=out)
    return out.view(rows, -1, *cached.shape[2:])[:, :keys].transpose(1, 2)
