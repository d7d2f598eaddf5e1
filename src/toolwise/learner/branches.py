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
from toolwise.kernels.sending import send
from toolwise.learner.trees import Segment, Span

MOST_PARTS = 6
"""Rows that share many short runs take more kernel calls than they are worth."""


Places = Tensor | slice
"""Of tokens that stand side by side, a slice: what is read there is not copied."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some tokens ask others, in sequences that stand one after the other."""

    queries: Places | None
    """Which tokens ask; None is all of them, each segment itself."""
    keys: Places | None
    query_ends: Tensor
    key_ends: Tensor
    """Cumulative lengths from 0, int32."""
    longest: tuple[int, int]
    """Queries and keys of the longest sequence."""
    once: bool = True
    """No token is asked in two sequences: its gradient need not be added up."""

    @property
    def causal(self) -> bool:
        return self.queries is None


class Kernel(Protocol):
    """Attention over sequences of many lengths, and its gradient."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        """[queries, heads, size] and the log-sum-exp [heads, queries]."""
        ...

    def backward(
        self, grad: Tensor, states: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def parts_of(segments: Sequence[Segment], device: Any) -> tuple[Part, ...]:
    """The segments themselves first, then the first span of every path, the second, ..."""
    own = ends_of([len(segment) for segment in segments], device)
    longest = max(map(len, segments))
    parts = [Part(None, None, own, own, (longest, longest))]
    for level in range(max(len(segment.path) for segment in segments)):
        runs = _runs(segments, level)
        asked = [span for _, span in runs]
        queries, keys = ([stop - start for start, stop in spans] for spans in ([who for who, _ in runs], asked))
        parts.append(
            Part(
                _places([who for who, _ in runs], device),
                _places(asked, device),
                ends_of(queries, device),
                ends_of(keys, device),
                (max(queries), max(keys)),
                once=_apart(asked),
            )
        )
    return tuple(parts)


def _runs(segments: Sequence[Segment], level: int) -> list[tuple[Span, Span]]:
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


def _apart(spans: Sequence[Span]) -> bool:
    ordered = sorted(spans)
    return all(one[1] <= other[0] for one, other in pairwise(ordered))


def _places(spans: Sequence[Span], device: Any) -> Places:
    if all(one[1] == other[0] for one, other in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return places_of(spans, device)


def places_of(spans: Sequence[Span], device: Any) -> Tensor:
    return send(np.concatenate([np.arange(*span) for span in spans]), device)


def ends_of(lengths: Sequence[int], device: Any) -> Tensor:
    """Cumulative lengths from 0."""
    return send(np.array([0, *accumulate(lengths)], dtype=np.int32), device)


class Flash:
    """torch's flash attention, asked for the log-sum-exp that its public form keeps to itself."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        ends = (part.query_ends, part.key_ends, *part.longest)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *ends, 0.0, part.causal, return_debug_mask=False, scale=scale
        )
        return out, lse

    def backward(
        self, grad: Tensor, states: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # the random state of a dropout of 0
        ends = (part.query_ends, part.key_ends, *part.longest)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *states, out, lse, *ends, 0.0, part.causal, unused, unused, scale=scale
        )
        return found


class InParts(torch.autograd.Function):
    """[T, heads, size] of queries, keys and values in, [T, heads, size] out."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float, kernel: Kernel
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
                _added(whole, there, more, part.once) for whole, more in zip((of_key, of_value), asked[1:], strict=True)
            )
        return of_query, of_key, of_value, None, None, None


def _added(whole: Tensor, places: Places, more: Tensor, once: bool) -> Tensor:
    if once or isinstance(places, slice):
        whole[places] += more
        return whole
    exact = torch.promote_types(whole.dtype, torch.float32)
    return whole.to(exact).index_add_(0, places, more.to(exact)).to(whole.dtype)


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float) -> Tensor:
    found: Tensor = InParts.apply(  # type: ignore[no-untyped-call]
        query.contiguous(), key.contiguous(), value.contiguous(), parts, scale, Flash()
    )
    return found
