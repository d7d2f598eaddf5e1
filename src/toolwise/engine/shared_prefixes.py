"""Groups the requests of a decode step by shared prefix, so that each group's common blocks are read once.

The kernel `kernels.shared_prefix_decode` reads them once per step. Groups maximise the number of block reads saved, so
a system prompt that all requests share can be worth less than the longer prompts that a few of them share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Requests of a step, by index, whose first `blocks` blocks are the same."""

    members: tuple[int, ...]
    blocks: int

    @property
    def saved_reads(self) -> int:
        return (len(self.members) - 1) * self.blocks


def prefix_groups(tables: Sequence[Sequence[int]], full: Sequence[int]) -> list[PrefixGroup]:
    """Put every request in one group, alone with nothing shared if that is best. `full[i]`: number of blocks of
    `tables[i]` that will not be written to."""
    return _split_group(tables, full, tuple(range(len(tables))), 0)


def _split_group(
    tables: Sequence[Sequence[int]], full: Sequence[int], members: tuple[int, ...], depth: int
) -> list[PrefixGroup]:
    """Split `members`, which have `depth` blocks in common, into groups."""
    if len(members) == 1:
        return [PrefixGroup(members, 0)]
    end = min(full[i] for i in members)
    first = tables[members[0]]
    if all(tables[i][depth:end] == first[depth:end] for i in members):
        depth = max(depth, end)
    while depth < end and all(tables[i][depth] == first[depth] for i in members):
        depth += 1
    one_group = PrefixGroup(members, depth)
    parts: dict[int, list[int]] = defaultdict(list)
    for i in members:
        # A request that ends here shares no further blocks: give it a unique key.
        parts[tables[i][depth] if depth < full[i] else -1 - i].append(i)
    if len(parts) == len(members):
        return [one_group] if depth else [PrefixGroup((i,), 0) for i in members]
    split = [group for part in parts.values() for group in _split_group(tables, full, tuple(part), depth)]
    return split if sum(group.saved_reads for group in split) > one_group.saved_reads else [one_group]
