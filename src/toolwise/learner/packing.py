"""Rows packed into micro-batches without padding, and what rows have in common computed once.

Rows in lexicographic order are a tree laid flat: all that a row shares with any row before it, it shares with the one
just before it. So a row adds its tokens from there on, and reads the rest where it already stands (trees.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from toolwise.kernels.host_to_device import to_device
from toolwise.learner.row_trees import Array, FlatTree, Segment, Span, layout_by_node, layout_by_row, reduce_sharing


class TokenRow(Protocol):
    """What packing needs of a row; `learner.rows.Row` is one."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def sampled(self) -> Sequence[bool]: ...


@dataclass(frozen=True)
class Packed:
    """One micro-batch: `T` tokens to compute, and `S` sampled tokens that they predict.

    A row's tokens after the last one that predicts a sampled token are left out: nothing is read from them. A token
    sampled in several rows that share it stands in the last four tensors once for each, since each row has its own
    old log-prob and advantage. They are ordered by `source`.
    """

    ids: Tensor
    """[T] token ids."""
    positions: Tensor
    """[T] depth in the row, from 0."""
    segments: tuple[Segment, ...]
    """How the T tokens hang together, in the order in which they stand."""
    source: Tensor
    """[S] which of the T tokens predicts it."""
    target: Tensor
    """[S] its id."""
    row: Tensor
    """[S] number of its row in the list given to `pack`."""
    at: Tensor
    """[S] its position in that row."""
    predictors: Tensor
    """[U] the distinct places in `source`, ascending: logits are needed there and nowhere else."""
    predicted_by: Tensor
    """[S] which of those predicts it: `predictors[predicted_by]` is `source`."""
    predicted: tuple[int, ...]
    """[U] how many of the S tokens each of them predicts."""

    @property
    def T(self) -> int:  # noqa: N802  # the letter of the shapes above
        return int(self.ids.shape[0])

    @property
    def S(self) -> int:  # noqa: N802
        return int(self.source.shape[0])


def pack(
    rows: Sequence[TokenRow],
    max_tokens: int,
    *,
    share_prefixes: bool = True,
    device: Any = "cpu",
    nodes: bool = False,
) -> list[Packed]:
    """All of `micro_batches`."""
    return list(micro_batches(rows, max_tokens, share_prefixes=share_prefixes, device=device, nodes=nodes))


def micro_batches(
    rows: Sequence[TokenRow],
    max_tokens: int,
    *,
    share_prefixes: bool = True,
    device: Any = "cpu",
    nodes: bool = False,
) -> Iterator[Packed]:
    """Micro-batches of at most `max_tokens` computed tokens each; a row that is longer has one to itself.

    Rows are cut apart where that makes the fewest tokens be computed twice. Rows without a sampled token that
    something predicts are in none of them. With `share_prefixes=False` every row is computed whole. `nodes` lays them
    out for kernels that attend to what is shared where it stands (`forward.prefers_node_layout`). Each is made when it
    is asked
    for: a GPU computes the one before.
    """
    sampled = {i: at for i, row in enumerate(rows) if len(at := _sampled_at(row))}
    ids = {i: np.fromiter(rows[i].ids, np.int64, len(rows[i].ids)) for i in sampled}
    needed = {i: ids[i][: at[-1]] for i, at in sampled.items()}
    order = list(sampled)
    shared = np.zeros(len(order), dtype=np.int64)
    if share_prefixes:
        # As big-endian bytes, which compare in one call and in the order of the numbers.
        order.sort(key=lambda i: needed[i].astype(">i8").tobytes())
        shared[1:] = [_common_prefix_length(needed[a], needed[b]) for a, b in pairwise(order)]
    lengths = np.array([len(needed[i]) for i in order], dtype=np.int64)
    shared = reduce_sharing(shared, lengths) if nodes else shared
    for start, stop in _split_rows(lengths, shared, max_tokens):
        these = [needed[i] for i in order[start:stop]], [0, *shared[start + 1 : stop].tolist()]
        laid = (layout_by_node(*these) if nodes else None) or layout_by_row(*these)
        yield _packed(laid, [(i, ids[i], sampled[i]) for i in order[start:stop]], device)


def _sampled_at(row: TokenRow) -> Array:
    """Where a row's sampled tokens are. Nothing predicts the first token of all."""
    sampled = row.sampled  # of a list through bytes, which takes a third of the time
    at = np.flatnonzero(np.frombuffer(bytes(sampled), bool) if isinstance(sampled, list) else np.asarray(sampled, bool))
    return at[at > 0].astype(np.int64)


def _common_prefix_length(a: Array, b: Array) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _split_rows(lengths: Array, shared: Array, max_tokens: int) -> list[Span]:
    """Where to cut the ordered rows: fewest tokens computed twice, then fewest micro-batches.

    A micro-batch of rows a..b computes all of row a and what each later row adds to the one before it; starting one
    at a therefore costs `shared[a]` tokens more than going on. That is a shortest path, found from left to right.
    """
    count = len(lengths)
    sums = np.concatenate([[0], np.cumsum(lengths - shared)])
    best = np.zeros(count + 1, dtype=np.int64)
    came_from = np.zeros(count + 1, dtype=np.int64)
    price = shared * (count + 1) + 1
    first = 0
    for stop in range(1, count + 1):
        while first < stop - 1 and shared[first] + sums[stop] - sums[first] > max_tokens:
            first += 1
        options = best[first:stop] + price[first:stop]
        came_from[stop] = first + int(options.argmin())
        best[stop] = options.min()
    cuts: list[Span] = []
    stop = count
    while stop:
        cuts.append((int(came_from[stop]), stop))
        stop = int(came_from[stop])
    return cuts[::-1]


def _packed(laid: FlatTree, rows: Sequence[tuple[int, Array, Array]], device: Any) -> Packed:
    source = np.concatenate([where[at - 1] for where, (_, _, at) in zip(laid.row_indices, rows, strict=True)])
    target = np.concatenate([ids[at] for _, ids, at in rows])
    row = np.concatenate([np.full(len(at), i) for i, _, at in rows])
    at = np.concatenate([at for _, _, at in rows])
    order = np.argsort(source, kind="stable")
    predictors, predicted_by, predicted = np.unique(source[order], return_inverse=True, return_counts=True)

    def tensor(values: Array) -> Tensor:
        return to_device(np.asarray(values, dtype=np.int64), device)

    return Packed(
        ids=tensor(laid.ids),
        positions=tensor(laid.positions),
        segments=tuple(laid.segments),
        source=tensor(source[order]),
        target=tensor(target[order]),
        row=tensor(row[order]),
        at=tensor(at[order]),
        predictors=tensor(predictors),
        predicted_by=tensor(predicted_by),
        predicted=tuple(predicted.tolist()),
    )
