"""Flattened prefix trees: rows laid out so that shared prefixes appear once.

Rows come in lexicographic order, each with the number of tokens it shares with the one before it. Two layouts:

    by row     a row's new tokens right after those of the row before: the fewest segments
    by node    split wherever rows diverge, so that every reader of a segment reads all of it: a kernel then reads it
               once for all of them, and they are adjacent if the tree is as simple as prompts with replies
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""[start, stop) token indices in a micro-batch."""
Array = NDArray[np.int64]
SHORT_BRANCH = 32
"""In tokens: recomputing a shorter branch is cheaper than a separate node."""
MIN_LEVEL_SAVING = 0.15
"""Fraction of the computed tokens that an inner tree level must save: everything below attends to it separately."""
MAX_DEPTH = 3
"""Ancestors of a node. Deeper trees are laid out by row: each level would be a kernel call
(`tree_attention.MAX_PARTS`)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that continues `path`: its tokens attend to the path and, causally, to the segment."""

    start: int
    stop: int
    path: tuple[Span, ...] = ()

    @property
    def depth(self) -> int:
        """Number of tokens in its path."""
        return sum(stop - start for start, stop in self.path)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatTree:
    """A flattened tree of rows."""

    segments: list[Segment]
    ids: Array
    positions: Array
    row_indices: list[Array]
    """For each row, the flat index of each of its tokens."""


# By row.


def layout_by_row(rows: Sequence[Array], shared: Sequence[int]) -> FlatTree:
    """Each row's new tokens after those of the row before; a segment's path is a prefix of the row before."""
    segments: list[Segment] = []
    row_indices: list[Array] = []
    spans: tuple[Span, ...] = ()
    total = 0
    for ids, common in zip(rows, shared, strict=True):
        spans = _truncate_path(spans, common)
        start, total = total, total + len(ids) - common
        prefix = row_indices[-1][:common] if row_indices else np.zeros(0, dtype=np.int64)
        row_indices.append(np.concatenate([prefix, np.arange(start, total)]))
        if total > start:
            segments.append(Segment(start, total, spans))
            spans = (*spans, (start, total))
    new_ids = [ids[common:] for ids, common in zip(rows, shared, strict=True)]
    depths = [np.arange(common, len(ids)) for ids, common in zip(rows, shared, strict=True)]
    return FlatTree(segments, np.concatenate(new_ids), np.concatenate(depths), row_indices)


def _truncate_path(spans: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    """The first `length` tokens of a path."""
    path: list[Span] = []
    for start, stop in spans:
        if not length:
            break
        count = min(length, stop - start)
        length -= count
        # A row that continues where the one before ended comes right after it: merge the spans.
        path = (
            [*path[:-1], (path[-1][0], start + count)]
            if path and path[-1][1] == start
            else [*path, (start, start + count)]
        )
    return tuple(path)


# By node.


@dataclass(frozen=True, slots=True)
class _Node:
    ids: Array
    depth: int
    path: tuple[int, ...]
    """Indices of its ancestors, root first."""

    @property
    def stop(self) -> int:
        return self.depth + len(self.ids)


def reduce_sharing(shared: Array, lengths: Array) -> Array:
    """Reduce how much each row shares with the one before it, since fewer branches and levels are faster.

    Done per tree, and only if the extra tokens stay within what one level may save: in a chain (e.g. turns whose
    thoughts are dropped from later prompts) each level is small but together they are almost everything.
    """
    result = shared.copy()
    roots = np.flatnonzero(shared == 0).tolist()
    for tree in (slice(*ends) for ends in pairwise([*roots, len(shared)])):
        limit = (1 + MIN_LEVEL_SAVING) * (lengths[tree] - shared[tree]).sum()
        trimmed = _drop_short_branches(shared[tree])
        for reduced in (_drop_small_levels(trimmed, lengths[tree]), trimmed):
            if (lengths[tree] - reduced).sum() <= limit:
                result[tree] = reduced
                break
    return result


def _drop_short_branches(shared: Array) -> Array:
    """Drop branches of a few tokens: rows that share little beyond the previous branch point diverge there instead."""
    result = shared.copy()
    for order in (range(len(result)), reversed(range(len(result)))):
        branch_points: list[int] = []
        for row in order:
            while branch_points and branch_points[-1] > result[row]:
                branch_points.pop()
            if branch_points and branch_points[-1] and result[row] - branch_points[-1] < SHORT_BRANCH:
                result[row] = branch_points[-1]
            else:
                branch_points.append(int(result[row]))
    return result


def _drop_small_levels(shared: Array, lengths: Array) -> Array:
    """Within one tree, recompute a short prefix that all groups share (e.g. a system prompt) once per group.

    0 1000 1000 | 100 1000 1000    two groups that share 100 tokens; 1000 within each
    0 1000 1000 |   0 1000 1000    the level at 100 is gone: two trees
    """
    result = shared.copy()
    pending = [(0, len(result), 0)]
    while pending:
        start, stop, parent = pending.pop()
        branch_points = result[start + 1 : stop]
        if not len(branch_points) or branch_points.min() == branch_points.max():
            continue
        level = int(branch_points.min())
        branch_rows = start + 1 + np.flatnonzero(branch_points == level)
        computed = (lengths[start:stop] - result[start:stop]).sum() + result[start] - parent
        if (level - parent) * len(branch_rows) < MIN_LEVEL_SAVING * computed:
            result[branch_rows] = level = parent
        pending += [(*rows, level) for rows in pairwise([start, *branch_rows.tolist(), stop])]
    return result


def layout_by_node(rows: Sequence[Array], shared: Sequence[int]) -> FlatTree | None:
    """The layout by node, or None if the tree is too deep for it to pay off."""
    nodes: list[_Node] = []
    paths: list[tuple[int, ...]] = []
    path: tuple[int, ...] = ()
    for ids, common, cuts in zip(rows, shared, _split_points([len(ids) for ids in rows], shared), strict=True):
        path = tuple(index for index in path if nodes[index].stop <= common)
        for start, stop in pairwise([common, *cuts, len(ids)]):
            if stop > start:
                nodes.append(_Node(ids[start:stop], start, path))
                path = (*path, len(nodes) - 1)
        paths.append(path)
    if max(len(node.path) for node in nodes) > MAX_DEPTH:
        return None
    parents = {index for node in nodes for index in node.path}
    by_level = sorted(range(len(nodes)), key=lambda n: (len(nodes[n].path), n not in parents))
    tree = _arrange_nodes(nodes, paths, by_level)
    return tree if _readers_are_adjacent(tree.segments) else _arrange_nodes(nodes, paths, range(len(nodes)))


def _split_points(lengths: Sequence[int], shared: Sequence[int]) -> list[list[int]]:
    """For each row, where later rows diverge from its new tokens.

    Three rows of 9 tokens; the second shares 5 with the first and the third 3 with the second: the first is split at 3
    and 5, the second, whose new tokens begin at 5, nowhere.
    """
    result: list[list[int]] = []
    branch_points: list[int] = []
    for length, common in zip(reversed(lengths), reversed(shared), strict=True):
        result.append([point for point in branch_points if common < point < length])
        while branch_points and branch_points[-1] >= common:
            branch_points.pop()
        branch_points.append(common)
    return result[::-1]


def _arrange_nodes(nodes: Sequence[_Node], paths: Sequence[tuple[int, ...]], order: Sequence[int]) -> FlatTree:
    ends = [0, *accumulate(len(nodes[index].ids) for index in order)]
    spans = dict(zip(order, pairwise(ends), strict=True))
    return FlatTree(
        [Segment(*spans[index], tuple(spans[parent] for parent in nodes[index].path)) for index in order],
        np.concatenate([nodes[index].ids for index in order]),
        np.concatenate([np.arange(nodes[index].depth, nodes[index].stop) for index in order]),
        [np.concatenate([np.arange(*spans[index]) for index in path]) for path in paths],
    )


def _readers_are_adjacent(segments: Sequence[Segment]) -> bool:
    for level in range(max(len(segment.path) for segment in segments)):
        spans = [span for span, _ in groupby(s.path[level] for s in segments if len(s.path) > level)]
        if len(set(spans)) < len(spans):
            return False
    return True
