"""Attention over packed rows: each segment of a micro-batch attends to its path and, causally, to itself.

Stands under transformers' attention interface as "toolwise_tree", which `forward` sets on its own copy of the model's
modules. Keys and values of a shared path are gathered from where they were computed, so that autograd adds up what all
its readers ask; on a GPU they are read where they stand (`branches.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import embedding, scaled_dot_product_attention, softmax

from toolwise.errors import ModelError
from toolwise.learner.row_trees import Segment
from toolwise.learner.tree_attention import (
    MAX_PARTS,
    AttentionPart,
    attend_in_parts,
    attention_parts,
    cu_seqlens,
    span_indices,
)

ATTENTION_NAME = "toolwise_tree"
QUERY_CHUNK = 512
"""So many queries of one segment at a time where the mask is a tensor: it stays small however long the rows are."""


@dataclass
class Layout:
    """Who sees whom, in the forms that the kernels want; made once for a micro-batch and used by all layers."""

    segments: Sequence[Segment]
    device: Any
    queries: list[int]
    """Length of each segment."""
    keys: list[int]
    """Length of each segment and its path."""
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    """Cumulative lengths from 0, int32."""
    parts: tuple[AttentionPart, ...] | None = None
    """The same for kernels that attend to shared paths without gathering them; None where nothing can."""
    keep_gathered: bool = False
    """Whether the backward pass finds the gathered keys in memory; it gathers them again otherwise."""
    calls: int = 0
    """How often an attention layer asked: a model that does not ask did not see this layout."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Sequence[Segment], device: Any, *, keep_gathered: bool = False) -> Layout:
        queries = [len(segment) for segment in segments]
        keys = [segment.depth + len(segment) for segment in segments]
        deepest = max((len(segment.path) for segment in segments), default=0)
        in_parts = torch.device(device).type == "cuda" and 0 < deepest < MAX_PARTS
        return cls(
            segments,
            device,
            queries,
            keys,
            cu_seqlens(queries, device),
            cu_seqlens(keys, device),
            attention_parts(segments, device) if in_parts else None,
            keep_gathered,
        )

    @cached_property
    def gather_index(self) -> Tensor | None:
        """[sum of keys] where the keys of each segment stand; None when they stand in order already."""
        if not any(segment.path for segment in self.segments):
            return None
        return span_indices([span for s in self.segments for span in (*s.path, (s.start, s.stop))], self.device)

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """[queries, keys], 0 where a query sees a key and -inf where not; the last query sees the last key.

        What is seen depends on how far a key is from its query and on nothing else, so that one tensor holds the
        masks of all lengths.
        """
        furthest = max(self.keys)
        if (window, like.dtype) not in self._masks:
            rows = min(QUERY_CHUNK, max(self.queries))
            of_query = torch.arange(furthest, furthest + rows, device=like.device)[:, None]
            distance = of_query - torch.arange(furthest + rows, device=like.device)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._masks[window, like.dtype] = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        skipped = furthest - (keys - queries)
        return self._masks[window, like.dtype][:queries, skipped : skipped + keys]


@cache
def implementation() -> str:
    """The name under which a model's layers find `attend`. transformers makes no mask for a name that its mask
    interface does not know: none of T x T ever exists."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    return ATTENTION_NAME


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    toolwise_layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, heads, T, size] in, [1, T, heads, size] out, as transformers asks of an attention function."""
    layout = toolwise_layout
    if layout is None or others.get("s_aux") is not None or others.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} attends in a way that packed rows do not know: use another model")
    layout.calls += 1
    how = _AttentionOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, dropout, sliding_window, softcap)
    # Tokens first: what is gathered is then one piece of memory a token.
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in _to_common_dtype(query, key, value))
    fits = _fits_kernel(query, how)
    if fits and layout.parts is not None and how.window is None:
        return attend_in_parts(query, key, value, layout.parts, how.scale)[None], None
    with _gather_keys_values(key, value, layout) as (key, value):
        attended = _varlen_attention if fits else _attention_by_segment
        out = attended(query, key, value, layout, how)
    return out[None], None


@dataclass(frozen=True, slots=True)
class _AttentionOptions:
    scale: float
    dropout: float
    window: int | None
    """How many keys back a query sees, itself included; None is all."""
    softcap: float | None


def _to_common_dtype(*states: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, rotary embeddings leave queries and keys in fp32 beside values in half precision."""
    kind = states[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states[-1].dtype
    return tuple(s.to(dtype) for s in states)


@contextmanager
def _gather_keys_values(key: Tensor, value: Tensor, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each segment and its path, one after the other.

    Where many rows share a long path these are many times what was computed, so the backward pass does not find them
    kept by each layer: it gathers them again.
    """
    index = layout.gather_index
    if index is None:
        yield key, value
        return
    # As an embedding: its backward adds up in fp32, in a fixed order, and is the fastest there is on a CPU.
    keys, values = (embedding(index, states.flatten(1)).view(-1, *states.shape[1:]) for states in (key, value))
    whence = {keys.untyped_storage().data_ptr(): key.detach(), values.untyped_storage().data_ptr(): value.detach()}
    size = keys[0].numel()

    def leave(saved: Tensor) -> Any:
        states = whence.get(saved.untyped_storage().data_ptr())
        if states is None:
            return saved
        start, inside = divmod(int(saved.storage_offset()), size)
        rows = index[start : start + saved.numel() // size]
        return states, rows, (saved.shape, saved.stride(), inside)

    def fetch(left: Any) -> Tensor:
        if isinstance(left, Tensor):
            return left
        states, rows, (shape, strides, inside) = left
        return embedding(rows, states.flatten(1)).as_strided(shape, strides, inside)

    with nullcontext() if layout.keep_gathered else saved_tensors_hooks(leave, fetch):
        yield keys, values


@cache
def _varlen() -> tuple[Any, frozenset[str]] | None:
    """The kernel, where this torch has one that we can ask, and the options that it takes."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    options = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, options) if {"scale", "window_size"} <= options else None


def _fits_kernel(query: Tensor, how: _AttentionOptions) -> bool:
    plain = how.softcap is None and not how.dropout
    sizes = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return plain and sizes and query.is_cuda and query.dtype.itemsize == 2 and _varlen() is not None


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, how: _AttentionOptions) -> Tensor:
    """Flash attention over sequences of many lengths. Its causal mask has the last query see the last key."""
    found = _varlen()
    assert found is not None
    kernel, known = found
    options: dict[str, Any] = {"scale": how.scale, "window_size": (-1 if how.window is None else how.window - 1, 0)}
    if "enable_gqa" in known:  # where it is no option, the kernel takes fewer key heads unasked
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    lengths = (layout.cu_seqlens_q, layout.cu_seqlens_k, max(layout.queries), max(layout.keys))
    out: Tensor = kernel(query.contiguous(), key.contiguous(), value.contiguous(), *lengths, **options)
    return out


def _attention_by_segment(query: Tensor, key: Tensor, value: Tensor, layout: Layout, how: _AttentionOptions) -> Tensor:
    outs = []
    split = torch.split
    parts = zip(split(query, layout.queries), split(key, layout.keys), split(value, layout.keys), strict=True)
    for part in parts:
        q, k, v = (states.transpose(0, 1)[None] for states in part)
        length, depth = q.shape[2], k.shape[2] - q.shape[2]
        plain = depth == 0 and how.softcap is None and (how.window is None or how.window >= length)
        step = length if plain else QUERY_CHUNK
        for start in range(0, length, step):
            few = q[:, :, start : start + step]
            seen = depth + start + few.shape[2]
            mask = None if plain else layout.mask(few.shape[2], seen, how.window, q)
            outs.append(_dense_attention(few, k[:, :, :seen], v[:, :, :seen], mask, how).squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: _AttentionOptions) -> Tensor:
    """Without a mask, causal over as many keys as queries."""
    if how.softcap is None or mask is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=how.scale, dropout_p=how.dropout, enable_gqa=True
        )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.tanh(q @ k.transpose(-1, -2) * (how.scale / how.softcap)) * how.softcap + mask
    weights = softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.dropout(weights, how.dropout, train=how.dropout > 0) @ v
