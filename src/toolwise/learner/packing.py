"""Packs rows into micro-batches without padding; shared prefixes are computed once.

Rows in lexicographic order form a flattened tree: the longest prefix a row shares with any earlier row, it shares with
the one right before it. So each row adds only its remaining tokens and reads the rest in place (`row_trees`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from toolwise.kernels.host_to_device import to_device
from toolwise.learner.row_trees import Array, FlatTree, Segment, Span, layout_by_node, layout_by_row, reduce_sharing


class TokenRow(Protocol):
    """What packing needs from a row, such as `learner.rows.Row`: lists, or arrays, which are faster."""

    @property
    def ids(self) -> Sequence[int] | NDArray[Any]: ...

    @property
    def sampled(self) -> Sequence[bool] | NDArray[Any]: ...


@dataclass(frozen=True)
class Packed:
    """One micro-batch: `T` tokens to compute, and `S` sampled tokens that they predict.

    A row's tokens after the last predictor of a sampled token are left out, since nothing reads them. A sampled token
    that several rows share has one entry in the [S] tensors per row, since each row has its own old log-prob and
    advantage. Entries are ordered by `source`.
    """

    ids: Tensor
    """[T] token ids."""
    positions: Tensor
    """[T] position in the row, from 0."""
    segments: tuple[Segment, ...]
    """How the T tokens form a tree, in order."""
    source: Tensor
    """[S] index of the token (of T) that predicts it."""
    target: Tensor
    """[S] its token id."""
    row: Tensor
    """[S] index of its row in the list given to `micro_batches`."""
    at: Tensor
    """[S] its position in that row."""
    predictors: Tensor
    """[U] the unique values of `source`, ascending: the only tokens that need logits."""
    predicted_by: Tensor
    """[S] index into `predictors`: `predictors[predicted_by]` equals `source`."""
    predicted: tuple[int, ...]
    """[U] the number of sampled tokens each predictor predicts."""

    @property
    def T(self) -> int:  # noqa: N802  # as in the shapes above
        return int(self.ids.shape[0])

    @property
    def S(self) -> int:  # noqa: N802
        return int(self.source.shape[0])


def micro_batches(
    rows: Sequence[TokenRow],
    max_tokens: int,
    *,
    share_prefixes: bool = True,
    device: Any = "cpu",
    nodes: bool = False,
) -> Iterator[Packed]:
    """Yield micro-batches of at most `max_tokens` computed tokens each; a longer row gets one to itself.

    Rows are split where the fewest tokens are computed twice. Rows without a predicted sampled token are left out. With
    `share_prefixes=False` every row is computed in full. `nodes` chooses the layout for kernels that attend to shared
    prefixes in place (`forward.prefers_node_layout`). Lazy, so that a GPU computes one while the next is prepared.
    """
    sampled = {i: positions for i, row in enumerate(rows) if len(positions := _sampled_at(row))}
    ids = {i: _token_ids(rows[i]) for i in sampled}
    needed = {i: ids[i][: positions[-1]] for i, positions in sampled.items()}
    order = list(sampled)
    shared = np.zeros(len(order), dtype=np.int64)
    if share_prefixes:
        # Big-endian bytes compare in one call and in numeric order.
        order.sort(key=lambda i: needed[i].astype(">i8").tobytes())
        shared[1:] = [common_prefix_length(needed[a], needed[b]) for a, b in pairwise(order)]
    lengths = np.array([len(needed[i]) for i in order], dtype=np.int64)
    shared = reduce_sharing(shared, lengths) if nodes else shared
    for start, stop in _split_rows(lengths, shared, max_tokens):
        tree_rows = [needed[i] for i in order[start:stop]], [0, *shared[start + 1 : stop].tolist()]
        tree = (layout_by_node(*tree_rows) if nodes else None) or layout_by_row(*tree_rows)
        yield _packed(tree, [(i, ids[i], sampled[i]) for i in order[start:stop]], device)


def _token_ids(row: TokenRow) -> Array:
    ids = row.ids
    # A list goes through an array, which takes a third of the time.
    return ids.astype(np.int64) if isinstance(ids, np.ndarray) else np.frombuffer(array("q", ids), np.int64)


def _sampled_at(row: TokenRow) -> Array:
    """Positions of a row's sampled tokens, without the first token of the row, which nothing predicts."""
    sampled = row.sampled  # lists go through bytes, which takes a third of the time
    positions = np.flatnonzero(
        np.frombuffer(bytes(sampled), bool) if isinstance(sampled, list) else np.asarray(sampled, bool)
    )
    return positions[positions > 0].astype(np.int64)


def common_prefix_length(a: Array, b: Array) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _split_rows(lengths: Array, shared: Array, max_tokens: int) -> list[Span]:
    """Split the ordered rows: fewest tokens computed twice, then fewest micro-batches.

    A micro-batch of rows a..b computes all of row a and the tokens each later row adds to the one before it, so
    starting a new one at a costs `shared[a]` extra tokens. This is a shortest path, solved from left to right.
    """
    count = len(lengths)
    sums = np.concatenate([[0], np.cumsum(lengths - shared)])
    best = np.zeros(count + 1, dtype=np.int64)
    previous = np.zeros(count + 1, dtype=np.int64)
    start_cost = shared * (count + 1) + 1
    earliest = 0
    for stop in range(1, count + 1):
        while earliest < stop - 1 and shared[earliest] + sums[stop] - sums[earliest] > max_tokens:
            earliest += 1
        options = best[earliest:stop] + start_cost[earliest:stop]
        previous[stop] = earliest + int(options.argmin())
        best[stop] = options.min()
    cuts: list[Span] = []
    stop = count
    while stop:
        cuts.append((int(previous[stop]), stop))
        stop = int(previous[stop])
    return cuts[::-1]


def _packed(tree: FlatTree, rows: Sequence[tuple[int, Array, Array]], device: Any) -> Packed:
    source = np.concatenate([indices[at - 1] for indices, (_, _, at) in zip(tree.row_indices, rows, strict=True)])
    target = np.concatenate([ids[at] for _, ids, at in rows])
    row = np.concatenate([np.full(len(at), i) for i, _, at in rows])
    at = np.concatenate([at for _, _, at in rows])
    order = np.argsort(source, kind="stable")
    ordered = source[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))  # as np.unique, which would sort again
    predictors, predicted = ordered[first], np.diff(first, append=len(ordered))
    predicted_by = np.repeat(np.arange(len(first)), predicted)

    def tensor(values: Array) -> Tensor:
        return to_device(np.asarray(values, dtype=np.int64), device)

    return Packed(
        ids=tensor(tree.ids),
        positions=tensor(tree.positions),
        segments=tuple(tree.segments),
        source=tensor(ordered),
        target=tensor(target[order]),
        row=tensor(row[order]),
        at=tensor(at[order]),
        predictors=tensor(predictors),
        predicted_by=tensor(predicted_by),
        predicted=tuple(predicted.tolist()),
    )
