"""Attention over the paged KV cache, registered with transformers' attention interface as "toolwise_paged".

All requests are concatenated in one row. Their keys and values are first written to the batch's slots; each request
then attends to its own blocks: in Triton kernels on a GPU, through SDPA in groups of similar length on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from toolwise.engine.length_groups import Group
from toolwise.errors import ModelError

ATTENTION_NAME = "toolwise_paged"


class Scratch:
    """A buffer reused by all layers: the OS would provide fresh memory page by page, which takes several times as long
    as filling it."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def reserve(self, size: int, like: Tensor) -> Tensor:
        if self._held is None or len(self._held) < size or self._held.dtype != like.dtype:
            self._held = torch.empty(size + size // 4, dtype=like.dtype)
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
    calls: int = 0
    """Calls by attention layers: a layer that does not call did not use the paged cache."""


def supports_paged_attention(model: Any) -> bool:
    """Whether each layer is plain causal attention through the attention interface."""
    try:
        trunk = model.get_decoder()
    except (AttributeError, NotImplementedError):
        return False
    config = trunk.config
    attention_types = set(getattr(config, "layer_types", None) or ("full_attention",))
    plain = attention_types == {"full_attention"} and not getattr(config, "attn_logit_softcapping", None)
    window = getattr(config, "sliding_window", None) if not getattr(config, "layer_types", None) else None
    unsupported = any(
        hasattr(module, name) for module in trunk.modules() for name in ("sinks", "relative_attention_bias")
    )
    unsupported = unsupported or bool(getattr(config, "kv_lora_rank", None))
    return plain and not window and not unsupported and bool(getattr(trunk, "_supports_attention_backend", False))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    toolwise_paged: PagedContext | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, heads, T, size] in, [1, T, heads, size] out, the signature of attention functions in transformers."""
    context = toolwise_paged
    if context is None or others.get("sliding_window") or others.get("softcap") or others.get("s_aux") is not None:
        raise ModelError(
            f"{type(module).__name__} uses attention that the paged cache does not support: "
            'set rollout.engine = "transformers"'
        )
    context.calls += 1
    keys, values = context.keys[module.layer_idx], context.values[module.layer_idx]
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda:
        return _attend_with_kernels(query, key, value, keys, values, context, scale)[None], None
    real = len(context.slots)
    keys.flatten(0, 1).index_copy_(0, context.slots, key[:real])
    values.flatten(0, 1).index_copy_(0, context.slots, value[:real])
    outs = [_attend_group(query[group.tokens], keys, values, group, scale, context.scratch) for group in context.groups]
    if real < len(query):
        outs.append(torch.zeros_like(query[real:]))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None], None


def _attend_with_kernels(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, context: PagedContext, scale: float
) -> Tensor:
    from toolwise import kernels

    kernels.store_kv(key, value, keys, values, context.slots)
    tables, lengths, starts = context.block_tables, context.context_lengths, context.query_starts
    assert tables is not None
    assert lengths is not None
    assert starts is not None
    if context.decoding:
        return kernels.paged_attention_decode(query, keys, values, tables, lengths, scale)
    return kernels.paged_attention_prefill(
        query, keys, values, tables, starts, lengths, scale, context.max_query_length
    )


def _attend_group(
    query: Tensor, keys: Tensor, values: Tensor, group: Group, scale: float, scratch: tuple[Scratch, Scratch]
) -> Tensor:
    """[tokens of the group, heads, size]"""
    heads, size = query.shape[1:]
    key_heads = keys.shape[2]
    if group.padded is not None:
        query = query[group.padded]
    k, v = (_gather_blocks(cached, group, buffer) for cached, buffer in zip((keys, values), scratch, strict=True))
    # Query heads that share a key head become additional queries: nothing is repeated.
    q = query.view(group.rows, group.queries, key_heads, heads // key_heads, size).permute(0, 2, 3, 1, 4)
    if group.causal:
        out = scaled_dot_product_attention(
            q.flatten(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=heads != key_heads
        )
        out = out.transpose(1, 2)
    else:
        out = scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=group.mask, scale=scale)
        out = out.view(group.rows, key_heads, heads // key_heads, group.queries, size).permute(0, 3, 1, 2, 4)
    out = out.reshape(group.rows * group.queries, heads, size)
    return out if group.real is None else out[group.real]


def _gather_blocks(cached: Tensor, group: Group, scratch: Scratch) -> Tensor:
    """[rows, key heads, keys, size]: gathers whole blocks, at the speed of a memory copy."""
    blocks = cached.flatten(1)
    out = scratch.reserve(len(group.blocks) * blocks.shape[1], blocks).view(-1, blocks.shape[1])
    torch.index_select(blocks, 0, group.blocks, out=out)
    return out.view(group.rows, -1, *cached.shape[2:])[:, : group.keys].transpose(1, 2)
