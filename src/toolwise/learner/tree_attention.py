"""Attention over packed rows in parts, on a GPU: each segment to itself, and all readers of a shared path to that path.

The parts are merged by log-sum-exp, so shared keys are not copied for each reader. Each part's gradient comes from the
kernel's backward pass, called with the merged output and log-sum-exp: its weights are then those of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.kernels import merge
from toolwise.kernels.host_to_device import to_device
from toolwise.learner.row_trees import Segment, Span

MAX_PARTS = 6
"""Beyond this, rows that share many short runs need more kernel calls than they save."""


TokenIndex = Tensor | slice
"""Contiguous tokens are a slice, which is read without a copy."""


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """One kernel call: some tokens attend to others, in concatenated sequences."""

    queries: TokenIndex | None
    """The query tokens; None means all, each segment attending to itself."""
    keys: TokenIndex | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    """Cumulative lengths from 0, int32."""
    max_seqlens: tuple[int, int]
    """Queries and keys of the longest sequence."""
    unique_keys: bool = True
    """Whether no key is in two sequences, so that its gradient needs no summing."""

    @property
    def causal(self) -> bool:
        return self.queries is None


def shallow_parts(segments: Sequence[Segment], device: Any) -> tuple[AttentionPart, ...] | None:
    """The parts of a micro-batch; None if paths have so many spans that gathering their keys is faster."""
    deepest = max((len(segment.path) for segment in segments), default=MAX_PARTS)
    return attention_parts(segments, device) if deepest < MAX_PARTS else None


def attention_parts(segments: Sequence[Segment], device: Any) -> tuple[AttentionPart, ...]:
    """The segments themselves first, then the first span of every path, then the second, …"""
    lengths = cu_seqlens([len(segment) for segment in segments], device)
    longest = max(map(len, segments))
    parts = [AttentionPart(None, None, lengths, lengths, (longest, longest))]
    for level in range(max(len(segment.path) for segment in segments)):
        runs = _shared_runs(segments, level)
        read_spans = [span for _, span in runs]
        queries, keys = (
            [stop - start for start, stop in spans] for spans in ([readers for readers, _ in runs], read_spans)
        )
        parts.append(
            AttentionPart(
                _token_index([readers for readers, _ in runs], device),
                _token_index(read_spans, device),
                cu_seqlens(queries, device),
                cu_seqlens(keys, device),
                (max(queries), max(keys)),
                unique_keys=_are_disjoint(read_spans),
            )
        )
    return tuple(parts)


def _shared_runs(segments: Sequence[Segment], level: int) -> list[tuple[Span, Span]]:
    """(query span, key span) pairs at one level; adjacent segments that share a span are merged."""
    runs: list[tuple[Span, Span]] = []
    for segment in segments:
        if len(segment.path) <= level:
            continue
        span = segment.path[level]
        (start, stop), last = runs[-1] if runs else ((0, 0), None)
        if last == span and stop == segment.start:
            runs[-1] = ((start, segment.stop), span)
        else:
            runs.append(((segment.start, segment.stop), span))
    return runs


def _are_disjoint(spans: Sequence[Span]) -> bool:
    ordered = sorted(spans)
    return all(left[1] <= right[0] for left, right in pairwise(ordered))


def _token_index(spans: Sequence[Span], device: Any) -> TokenIndex:
    if all(left[1] == right[0] for left, right in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return span_indices(spans, device)


def span_indices(spans: Sequence[Span], device: Any) -> Tensor:
    return to_device(np.concatenate([np.arange(*span) for span in spans]), device)


def cu_seqlens(lengths: Sequence[int], device: Any) -> Tensor:
    """Cumulative lengths from 0."""
    return to_device(np.array([0, *accumulate(lengths)], dtype=np.int32), device)


class FlashKernel:
    """torch's flash attention through the private op, since the public API does not return the log-sum-exp."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [queries, heads, size] and the log-sum-exp [heads, queries]."""
        seqlens = (part.cu_seqlens_q, part.cu_seqlens_k, *part.max_seqlens)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *seqlens, 0.0, part.causal, return_debug_mask=False, scale=scale
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        part: AttentionPart,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # the random state of a dropout of 0
        seqlens = (part.cu_seqlens_q, part.cu_seqlens_k, *part.max_seqlens)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *states, out, lse, *seqlens, 0.0, part.causal, unused, unused, scale=scale
        )
        return grads


Parts = Sequence[AttentionPart]


def attend_to_parts(
    query: Tensor, key: Tensor, value: Tensor, parts: Parts, scale: float, kernel: FlashKernel
) -> tuple[Tensor, Tensor]:
    """The output [T, heads, size] and the log-sum-exp [heads, T] of each token over the keys of all parts."""
    out, lse = kernel.forward(query, key, value, parts[0], scale)
    for part in parts[1:]:
        query_index, key_index = part.queries, part.keys
        assert query_index is not None
        part_out, part_lse = kernel.forward(query[query_index], key[key_index], value[key_index], part, scale)
        merge(out, lse, part_out, part_lse, query_index)
    return out, lse


def attend_to_parts_backward(
    grad: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    parts: Parts,
    scale: float,
    kernel: FlashKernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values (`states`)."""
    grad_query, grad_key, grad_value = kernel.backward(grad, states, out, lse, parts[0], scale)
    query, key, value = states
    for part in parts[1:]:
        query_index, key_index = part.queries, part.keys
        assert key_index is not None
        part_grads = kernel.backward(
            grad[query_index],
            (query[query_index], key[key_index], value[key_index]),
            out[query_index],
            lse[:, query_index].contiguous(),
            part,
            scale,
        )
        grad_query[query_index] += part_grads[0]
        grad_key, grad_value = (
            _accumulate(total, key_index, part_grad, part.unique_keys)
            for total, part_grad in zip((grad_key, grad_value), part_grads[1:], strict=True)
        )
    return grad_query, grad_key, grad_value


class PartwiseAttention(torch.autograd.Function):
    """[T, heads, size] of queries, keys and values in, [T, heads, size] out."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Parts, scale: float, kernel: FlashKernel
    ) -> Tensor:
        out, lse = attend_to_parts(query, key, value, parts, scale, kernel)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.how = parts, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *states, out, lse = ctx.saved_tensors
        return (*attend_to_parts_backward(grads[0].contiguous(), tuple(states), out, lse, *ctx.how), None, None, None)


def _accumulate(total: Tensor, index: TokenIndex, part: Tensor, unique_keys: bool) -> Tensor:
    if unique_keys or isinstance(index, slice):
        total[index] += part
        return total
    dtype = torch.promote_types(total.dtype, torch.float32)
    return total.to(dtype).index_add_(0, index, part.to(dtype)).to(total.dtype)


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor, parts: Parts, scale: float) -> Tensor:
    out: Tensor = PartwiseAttention.apply(  # type: ignore[no-untyped-call]
        query.contiguous(), key.contiguous(), value.contiguous(), parts, scale, FlashKernel()
    )
    return out
