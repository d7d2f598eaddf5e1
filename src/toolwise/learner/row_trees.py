"""Rows laid flat as a tree: what they have in common stands once, and what each has of its own hangs on it.

Rows come in lexicographic order, each with the number of tokens that it shares with the one before it. Two ways:

    in turn    a row's own tokens right after those of the row before: the fewest segments
    as nodes   cut wherever rows part, so that whoever reads a segment reads all of it: a kernel then reads it once for
               all of them, and finds them side by side where the tree is as simple as prompts and their replies are
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""From, up to: places in a micro-batch."""
Array = NDArray[np.int64]
SHORT_BRANCH = 32
"""Tokens: computing so few twice takes less than a branch of their own."""
MIN_LEVEL_SAVING = 0.15
"""Share of the tokens that a level above others must save, since all who are below it attend to it apart."""
MAX_DEPTH = 3
"""Nodes above a node. Deeper trees stand in turn: each level would be a kernel call (`branches.MAX_PARTS`)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that continues what stands at `path`; each of its tokens sees the path, and itself causally."""

    start: int
    stop: int
    path: tuple[Span, ...] = ()

    @property
    def depth(self) -> int:
        """How many tokens stand before it."""
        return sum(stop - start for start, stop in self.path)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatTree:
    """A tree of rows, flat."""

    segments: list[Segment]
    ids: Array
    positions: Array
    row_indices: list[Array]
    """For each row, where each of its tokens stands."""


# In turn.


def layout_by_row(rows: Sequence[Array], shared: Sequence[int]) -> FlatTree:
    """Each row's own tokens after those of the row before; the path of a segment is the row before, cut short."""
    segments: list[Segment] = []
    row_indices: list[Array] = []
    spans: tuple[Span, ...] = ()
    total = 0
    for ids, common in zip(rows, shared, strict=True):
        spans = _truncate_path(spans, common)
        start, total = total, total + len(ids) - common
        before = row_indices[-1][:common] if row_indices else np.zeros(0, dtype=np.int64)
        row_indices.append(np.concatenate([before, np.arange(start, total)]))
        if total > start:
            segments.append(Segment(start, total, spans))
            spans = (*spans, (start, total))
    own = [ids[common:] for ids, common in zip(rows, shared, strict=True)]
    depths = [np.arange(common, len(ids)) for ids, common in zip(rows, shared, strict=True)]
    return FlatTree(segments, np.concatenate(own), np.concatenate(depths), row_indices)


def _truncate_path(spans: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    """The first `length` tokens of a path."""
    kept: list[Span] = []
    for start, stop in spans:
        if not length:
            break
        taken = min(length, stop - start)
        length -= taken
        # A row that goes on where the one before it ended stands right after it: one span, not two.
        kept = (
            [*kept[:-1], (kept[-1][0], start + taken)]
            if kept and kept[-1][1] == start
            else [*kept, (start, start + taken)]
        )
    return tuple(kept)


# As nodes.


@dataclass(frozen=True, slots=True)
class _Node:
    ids: Array
    depth: int
    path: tuple[int, ...]
    """Numbers of the nodes above it, the root first."""

    @property
    def stop(self) -> int:
        return self.depth + len(self.ids)


def reduce_sharing(shared: Array, lengths: Array) -> Array:
    """How much each row is to share with the one before it where few branches and few levels are the faster.

    Tree by tree, and never at the price of more tokens than a level is worth: in a chain, as of turns whose thoughts
    are left out of what follows, each level is small and all of them are everything.
    """
    found = shared.copy()
    roots = np.flatnonzero(shared == 0).tolist()
    for tree in (slice(*ends) for ends in pairwise([*roots, len(shared)])):
        most = (1 + MIN_LEVEL_SAVING) * (lengths[tree] - shared[tree]).sum()
        trimmed = _drop_short_branches(shared[tree])
        for less in (_drop_small_levels(trimmed, lengths[tree]), trimmed):
            if (lengths[tree] - less).sum() <= most:
                found[tree] = less
                break
    return found


def _drop_short_branches(shared: Array) -> Array:
    """Rows that stay together for a few tokens after others have left part from each other where those left."""
    found = shared.copy()
    for order in (range(len(found)), reversed(range(len(found)))):
        partings: list[int] = []
        for row in order:
            while partings and partings[-1] > found[row]:
                partings.pop()
            if partings and partings[-1] and found[row] - partings[-1] < SHORT_BRANCH:
                found[row] = partings[-1]
            else:
                partings.append(int(found[row]))
    return found


def _drop_small_levels(shared: Array, lengths: Array) -> Array:
    """Of one tree: what all groups begin with, as with a system prompt, is computed for each where it is short.

    0 1000 1000 | 100 1000 1000    two groups that share 100 tokens; 1000 within each
    0 1000 1000 |   0 1000 1000    the level that began at 100 is gone: two trees
    """
    found = shared.copy()
    within = [(0, len(found), 0)]
    while within:
        start, stop, above = within.pop()
        partings = found[start + 1 : stop]
        if not len(partings) or partings.min() == partings.max():
            continue
        level = int(partings.min())
        at = start + 1 + np.flatnonzero(partings == level)
        computed = (lengths[start:stop] - found[start:stop]).sum() + found[start] - above
        if (level - above) * len(at) < MIN_LEVEL_SAVING * computed:
            found[at] = level = above
        within += [(*rows, level) for rows in pairwise([start, *at.tolist(), stop])]
    return found


def layout_by_node(rows: Sequence[Array], shared: Sequence[int]) -> FlatTree | None:
    """None where the tree is too deep for it to pay."""
    nodes: list[_Node] = []
    paths: list[tuple[int, ...]] = []
    path: tuple[int, ...] = ()
    for ids, common, cuts in zip(rows, shared, _split_points([len(ids) for ids in rows], shared), strict=True):
        path = tuple(number for number in path if nodes[number].stop <= common)
        for start, stop in pairwise([common, *cuts, len(ids)]):
            if stop > start:
                nodes.append(_Node(ids[start:stop], start, path))
                path = (*path, len(nodes) - 1)
        paths.append(path)
    if max(len(node.path) for node in nodes) > MAX_DEPTH:
        return None
    read = {number for node in nodes for number in node.path}
    level_by_level = sorted(range(len(nodes)), key=lambda n: (len(nodes[n].path), n not in read))
    laid = _arrange_nodes(nodes, paths, level_by_level)
    return laid if _readers_are_adjacent(laid.segments) else _arrange_nodes(nodes, paths, range(len(nodes)))


def _split_points(lengths: Sequence[int], shared: Sequence[int]) -> list[list[int]]:
    """Where later rows part from the tokens that each row has of its own.

    Three rows of 9 tokens, of which the second shares 5 with the first and the third 3 with the second: the first is
    cut at 3 and 5, the second, whose own tokens begin at 5, nowhere.
    """
    found: list[list[int]] = []
    partings: list[int] = []
    for length, common in zip(reversed(lengths), reversed(shared), strict=True):
        found.append([place for place in partings if common < place < length])
        while partings and partings[-1] >= common:
            partings.pop()
        partings.append(common)
    return found[::-1]


def _arrange_nodes(nodes: Sequence[_Node], paths: Sequence[tuple[int, ...]], order: Sequence[int]) -> FlatTree:
    ends = [0, *accumulate(len(nodes[number].ids) for number in order)]
    spans = dict(zip(order, pairwise(ends), strict=True))
    return FlatTree(
        [Segment(*spans[number], tuple(spans[above] for above in nodes[number].path)) for number in order],
        np.concatenate([nodes[number].ids for number in order]),
        np.concatenate([np.arange(nodes[number].depth, nodes[number].stop) for number in order]),
        [np.concatenate([np.arange(*spans[number]) for number in path]) for path in paths],
    )


def _readers_are_adjacent(segments: Sequence[Segment]) -> bool:
    for level in range(max(len(segment.path) for segment in segments)):
        read = [span for span, _ in groupby(s.path[level] for s in segments if len(s.path) > level)]
        if len(set(read)) < len(read):
            return False
    return True
