"""Attention of packed rows in parts, on a GPU: every segment to itself, and all who share a path to that path.

The parts are merged by log-sum-exp, so that nothing shared is copied for each of its readers; and each part's gradient
comes from the kernel's own backward pass, given the merged result: its weights are then those of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from toolwise.kernels import merge
from toolwise.kernels.host_to_device import to_device
from toolwise.learner.row_trees import Segment, Span

MAX_PARTS = 6
"""Rows that share many short runs take more kernel calls than they are worth."""


TokenIndex = Tensor | slice
"""Of tokens that stand side by side, a slice: what is read there is not copied."""


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Some tokens ask others, in sequences that stand one after the other."""

    queries: TokenIndex | None
    """Which tokens ask; None is all of them, each segment itself."""
    keys: TokenIndex | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    """Cumulative lengths from 0, int32."""
    max_seqlens: tuple[int, int]
    """Queries and keys of the longest sequence."""
    unique_keys: bool = True
    """No token is asked in two sequences: its gradient need not be added up."""

    @property
    def causal(self) -> bool:
        return self.queries is None


class VarlenKernel(Protocol):
    """Attention over sequences of many lengths, and its gradient."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, scale: float
    ) -> tuple[Tensor, Tensor]:
        """[queries, heads, size] and the log-sum-exp [heads, queries]."""
        ...

    def backward(
        self,
        grad: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        part: AttentionPart,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def attention_parts(segments: Sequence[Segment], device: Any) -> tuple[AttentionPart, ...]:
    """The segments themselves first, then the first span of every path, the second, ..."""
    own = cu_seqlens([len(segment) for segment in segments], device)
    longest = max(map(len, segments))
    parts = [AttentionPart(None, None, own, own, (longest, longest))]
    for level in range(max(len(segment.path) for segment in segments)):
        runs = _shared_runs(segments, level)
        asked = [span for _, span in runs]
        queries, keys = ([stop - start for start, stop in spans] for spans in ([who for who, _ in runs], asked))
        parts.append(
            AttentionPart(
                _token_index([who for who, _ in runs], device),
                _token_index(asked, device),
                cu_seqlens(queries, device),
                cu_seqlens(keys, device),
                (max(queries), max(keys)),
                unique_keys=_are_disjoint(asked),
            )
        )
    return tuple(parts)


def _shared_runs(segments: Sequence[Segment], level: int) -> list[tuple[Span, Span]]:
    """Who asks, and whom: neighbours that share a span of their paths ask it together."""
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
    return all(one[1] <= other[0] for one, other in pairwise(ordered))


def _token_index(spans: Sequence[Span], device: Any) -> TokenIndex:
    if all(one[1] == other[0] for one, other in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return span_indices(spans, device)


def span_indices(spans: Sequence[Span], device: Any) -> Tensor:
    return to_device(np.concatenate([np.arange(*span) for span in spans]), device)


def cu_seqlens(lengths: Sequence[int], device: Any) -> Tensor:
    """Cumulative lengths from 0."""
    return to_device(np.array([0, *accumulate(lengths)], dtype=np.int32), device)


class FlashKernel:
    """torch's flash attention, asked for the log-sum-exp that its public form keeps to itself."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, scale: float
    ) -> tuple[Tensor, Tensor]:
        ends = (part.cu_seqlens_q, part.cu_seqlens_k, *part.max_seqlens)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *ends, 0.0, part.causal, return_debug_mask=False, scale=scale
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
        ends = (part.cu_seqlens_q, part.cu_seqlens_k, *part.max_seqlens)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *states, out, lse, *ends, 0.0, part.causal, unused, unused, scale=scale
        )
        return found


class PartwiseAttention(torch.autograd.Function):
    """[T, heads, size] of queries, keys and values in, [T, heads, size] out."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: Sequence[AttentionPart],
        scale: float,
        kernel: VarlenKernel,
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value, parts[0], scale)
        for part in parts[1:]:
            here, there = part.queries, part.keys
            assert here is not None
            more, its = kernel.forward(query[here], key[there], value[there], part, scale)
            merge(out, lse, more, its, here)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.how = parts, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        parts, scale, kernel = ctx.how
        grad = grads[0].contiguous()
        of_query, of_key, of_value = kernel.backward(grad, (query, key, value), out, lse, parts[0], scale)
        for part in parts[1:]:
            here, there = part.queries, part.keys
            states = (query[here], key[there], value[there])
            asked = kernel.backward(grad[here], states, out[here], lse[:, here].contiguous(), part, scale)
            of_query[here] += asked[0]
            of_key, of_value = (
                _accumulate(whole, there, more, part.unique_keys)
                for whole, more in zip((of_key, of_value), asked[1:], strict=True)
            )
        return of_query, of_key, of_value, None, None, None


def _accumulate(whole: Tensor, places: TokenIndex, more: Tensor, unique_keys: bool) -> Tensor:
    if unique_keys or isinstance(places, slice):
        whole[places] += more
        return whole
    exact = torch.promote_types(whole.dtype, torch.float32)
    return whole.to(exact).index_add_(0, places, more.to(exact)).to(whole.dtype)


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor, parts: Sequence[AttentionPart], scale: float) -> Tensor:
    found: Tensor = PartwiseAttention.apply(  # type: ignore[no-untyped-call]
        query.contiguous(), key.contiguous(), value.contiguous(), parts, scale, FlashKernel()
    )
    return found
