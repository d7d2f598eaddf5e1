"""Who shares the beginning of whom: requests of a decode step in groups whose first blocks are the same.

A group's common blocks are then read once a step (`kernels.shared_prefix_decode`). What counts is how many reads of a
block are saved, so a system prompt that all have is worth less than the longer prompts that a few have each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """`members` of a step, by number, whose first `blocks` blocks are the same."""

    members: tuple[int, ...]
    blocks: int

    @property
    def saved_reads(self) -> int:
        return (len(self.members) - 1) * self.blocks


def prefix_groups(tables: Sequence[Sequence[int]], full: Sequence[int]) -> list[PrefixGroup]:
    """Every request in one group, alone with nothing shared where that is best. `full[i]`: blocks of `tables[i]` that
    nothing will be written to."""
    return _split_group(tables, full, tuple(range(len(tables))), 0)


def _split_group(
    tables: Sequence[Sequence[int]], full: Sequence[int], members: tuple[int, ...], depth: int
) -> list[PrefixGroup]:
    """Groups of members that have `depth` blocks in common."""
    if len(members) == 1:
        return [PrefixGroup(members, 0)]
    end = min(full[i] for i in members)
    first = tables[members[0]]
    if all(tables[i][depth:end] == first[depth:end] for i in members):
        depth = max(depth, end)
    while depth < end and all(tables[i][depth] == first[depth] for i in members):
        depth += 1
    together = PrefixGroup(members, depth)
    parts: dict[int, list[int]] = defaultdict(list)
    for i in members:
        # Those that end here go on with nobody: a number of their own.
        parts[tables[i][depth] if depth < full[i] else -1 - i].append(i)
    if len(parts) == len(members):
        return [together] if depth else [PrefixGroup((i,), 0) for i in members]
    apart = [group for part in parts.values() for group in _split_group(tables, full, tuple(part), depth)]
    return apart if sum(group.saved_reads for group in apart) > together.saved_reads else [together]
