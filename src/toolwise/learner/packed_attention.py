"""Attention over packed rows: each segment of a micro-batch attends to its path and, causally, to itself.

Registered in transformers' attention interface as "toolwise_tree", which `forward` sets on its copy of the model's
modules. Keys and values of a shared path are gathered for each segment that reads them, and autograd sums their
gradients; on a GPU they are read in place (`tree_attention`).
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
from torch.nn.functional import embedding, scaled_dot_product_attention

from toolwise.errors import ModelError
from toolwise.learner.row_trees import Segment
from toolwise.learner.tree_attention import (
    AttentionPart,
    attend_in_parts,
    cu_seqlens,
    shallow_parts,
    span_indices,
)
from toolwise.models.dense_attention import dense_attention

ATTENTION_NAME = "toolwise_tree"
QUERY_CHUNK = 512
"""Queries of one segment processed at a time when a mask tensor is needed, so that it stays small for long rows."""


@dataclass
class Layout:
    """Which tokens attend to which, in the forms the kernels need; built once per micro-batch for all layers."""

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
    """The same for kernels that attend to shared paths without gathering them; None if no such kernel applies."""
    keep_gathered: bool = False
    """Whether to keep the gathered keys for the backward pass; otherwise it gathers them again."""
    windows: Sequence[int | None] | None = None
    """Sliding window of each layer; None to take what the layer passes to its attention."""
    calls: int = 0
    """Number of attention layers that used this layout; fewer than the model's layers means it was ignored."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        device: Any,
        *,
        keep_gathered: bool = False,
        windows: Sequence[int | None] | None = None,
    ) -> Layout:
        queries = [len(segment) for segment in segments]
        keys = [segment.depth + len(segment) for segment in segments]
        return cls(
            segments,
            device,
            queries,
            keys,
            cu_seqlens(queries, device),
            cu_seqlens(keys, device),
            shallow_parts(segments, device) if torch.device(device).type == "cuda" else None,
            keep_gathered,
            windows,
        )

    @cached_property
    def gather_index(self) -> Tensor | None:
        """[sum of keys]: token indices of each segment's keys; None if they are already in order."""
        if not any(segment.path for segment in self.segments):
            return None
        return span_indices([span for s in self.segments for span in (*s.path, (s.start, s.stop))], self.device)

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """[queries, keys]: 0 where a query sees a key, -inf elsewhere; the last query sees the last key.

        Visibility depends only on the distance between query and key, so one tensor contains the masks of all lengths.
        """
        max_keys = max(self.keys)
        if (window, like.dtype) not in self._masks:
            rows = min(QUERY_CHUNK, max(self.queries))
            query_positions = torch.arange(max_keys, max_keys + rows, device=like.device)[:, None]
            distance = query_positions - torch.arange(max_keys + rows, device=like.device)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._masks[window, like.dtype] = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        skipped = max_keys - (keys - queries)
        return self._masks[window, like.dtype][:queries, skipped : skipped + keys]


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
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, heads, T, size] in, [1, T, heads, size] out: the signature transformers expects of an attention function."""
    layout = toolwise_layout
    if layout is None or options.get("position_bias") is not None:
        raise ModelError(
            f"{type(module).__name__} uses a position bias or no layout, which packed rows do not support: use another "
            "model"
        )
    layout.calls += 1
    window = sliding_window if layout.windows is None else layout.windows[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    config = _AttentionOptions(scale, dropout, window, softcap or None, s_aux)
    # Tokens first, so that gathering reads one contiguous piece per token.
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in _to_common_dtype(query, key, value))
    fits = _fits_kernel(query, config) and query.shape[-1] == value.shape[-1]
    if fits and layout.parts is not None and config.window is None:
        return attend_in_parts(query, key, value, layout.parts, config.scale)[None], None
    with _gather_keys_values(key, value, layout) as (key, value):
        attention = _varlen_attention if fits else _attention_by_segment
        out = attention(query, key, value, layout, config)
    return out[None], None


@dataclass(frozen=True, slots=True)
class _AttentionOptions:
    scale: float
    dropout: float
    window: int | None
    """Number of keys a query sees, including its own; None means all."""
    softcap: float | None
    sinks: Tensor | None = None
    """[heads]: logits of one more key, without a value."""

    @property
    def dense(self) -> bool:
        """Whether torch's fused attention cannot compute this."""
        return self.softcap is not None or self.sinks is not None


def _to_common_dtype(*states: Tensor) -> tuple[Tensor, ...]:
    """Cast to one dtype: under autocast, rotary embeddings leave queries and keys in fp32, values in half precision."""
    device_type = states[0].device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states[-1].dtype
    return tuple(s.to(dtype) for s in states)


@contextmanager
def _gather_keys_values(key: Tensor, value: Tensor, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each segment and its path, concatenated.

    If many rows share a long path, these are many times larger than what was computed, so layers do not keep them: the
    backward pass gathers them again.
    """
    index = layout.gather_index
    if index is None:
        yield key, value
        return
    # As an embedding: its backward sums in fp32, in a fixed order, and is the fastest option on a CPU.
    keys, values = (embedding(index, states.flatten(1)).view(-1, *states.shape[1:]) for states in (key, value))
    sources = {keys.untyped_storage().data_ptr(): key.detach(), values.untyped_storage().data_ptr(): value.detach()}

    def pack(saved: Tensor) -> Any:
        states = sources.get(saved.untyped_storage().data_ptr())
        if states is None:
            return saved
        size = states[0].numel()
        start, offset = divmod(int(saved.storage_offset()), size)
        rows = index[start : start + saved.numel() // size]
        return states, rows, (saved.shape, saved.stride(), offset)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        states, rows, (shape, strides, offset) = packed
        return embedding(rows, states.flatten(1)).as_strided(shape, strides, offset)

    with nullcontext() if layout.keep_gathered else saved_tensors_hooks(pack, unpack):
        yield keys, values


@cache
def _varlen() -> tuple[Any, frozenset[str]] | None:
    """torch's varlen attention kernel and its option names; None if this version lacks it or the options we need."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    options = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, options) if {"scale", "window_size"} <= options else None


def _fits_kernel(query: Tensor, config: _AttentionOptions) -> bool:
    plain = not config.dense and not config.dropout
    sizes = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return plain and sizes and query.is_cuda and query.dtype.itemsize == 2 and _varlen() is not None


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, config: _AttentionOptions) -> Tensor:
    """Flash attention over sequences of different lengths. Its causal mask lets the last query see the last key."""
    varlen = _varlen()
    assert varlen is not None
    kernel, supported = varlen
    options: dict[str, Any] = {
        "scale": config.scale,
        "window_size": (-1 if config.window is None else config.window - 1, 0),
    }
    if "enable_gqa" in supported:  # without this option, the kernel accepts fewer key heads anyway
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    lengths = (layout.cu_seqlens_q, layout.cu_seqlens_k, max(layout.queries), max(layout.keys))
    out: Tensor = kernel(query.contiguous(), key.contiguous(), value.contiguous(), *lengths, **options)
    return out


def _attention_by_segment(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, config: _AttentionOptions
) -> Tensor:
    outs = []
    split = torch.split
    parts = zip(split(query, layout.queries), split(key, layout.keys), split(value, layout.keys), strict=True)
    for part in parts:
        q, k, v = (states.transpose(0, 1)[None] for states in part)
        length, depth = q.shape[2], k.shape[2] - q.shape[2]
        plain = depth == 0 and not config.dense and (config.window is None or config.window >= length)
        step = length if plain else QUERY_CHUNK
        for start in range(0, length, step):
            q_chunk = q[:, :, start : start + step]
            seen = depth + start + q_chunk.shape[2]
            mask = None if plain else layout.mask(q_chunk.shape[2], seen, config.window, q)
            outs.append(
                _dense_attention(q_chunk, k[:, :, :seen], v[:, :, :seen], mask, config).squeeze(0).transpose(0, 1)
            )
    return torch.cat(outs)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, config: _AttentionOptions) -> Tensor:
    """Without a mask, causal attention over equally many keys and queries."""
    if not config.dense or mask is None:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=config.scale,
            dropout_p=config.dropout,
            enable_gqa=True,
        )
    return dense_attention(
        q, k, v, mask, scale=config.scale, softcap=config.softcap, sinks=config.sinks, dropout=config.dropout
    )
