"""Which pieces of a batch attend together on a CPU: those of like length, so that little of a call is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

MAX_PADDING_FRACTION = 0.25
"""Share of a group's keys that may be padding before it is worth a call of its own."""
FREE_PADDING_KEYS = 512
"""As many padded keys cost no more than a call."""
MAX_GROUP_KEY_BYTES = 3 << 19
"""Keys of one layer that a group gathers at most: they are still in the core's own cache when they are read."""


@dataclass(slots=True)
class Group:
    """Pieces that attend in one call: `tokens` of the row, as [rows, queries], to blocks [rows, columns]."""

    tokens: slice
    rows: int
    queries: int
    padded: Tensor | None
    """[rows * queries] where each query stands in `tokens`, where pieces differ in length."""
    real: Tensor | None
    """Which of them are no padding."""
    blocks: Tensor
    """[rows * columns]"""
    keys: int
    """How many keys of these blocks any query sees."""
    mask: Tensor | None
    """[rows, 1, queries, keys], 0 where a query sees a key; None where all see all, or all begin with nothing held."""
    causal: bool


def chunk_order(chunks: Sequence[tuple[int, int]]) -> list[int]:
    """The order in which (held, length) stand in the row, so that each group is one stretch of it."""
    return sorted(range(len(chunks)), key=lambda i: (chunks[i][1], chunks[i][0]))


def group_chunks(
    held: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    queries_per_kv_head: int,
    dtype: torch.dtype,
    max_keys: int = 1 << 30,
    fixed_shapes: bool = False,
) -> list[Group]:
    """Groups of neighbours with little padding, of `max_keys` where there are several in it. `queries_per_kv_head`:
    query heads a
    key head. With `fixed_shapes` a piece is computed in a shape that depends on itself alone, so that its company does
    not
    change a bit of it."""
    groups: list[Group] = []
    first = token = 0
    while first < len(held):
        last = (
            _end_of_same_shape(held, lengths, first, block_size)
            if fixed_shapes
            else _end_of_group(held, lengths, first, max_keys)
        )
        here = slice(first, last)
        tokens = slice(token, token + sum(lengths[here]))
        made = _group(held[here], lengths[here], tables[here], block_size, whole_blocks=fixed_shapes)
        groups.append(
            replace(made, tokens=tokens, mask=_mask(made, held[here], queries_per_kv_head, dtype, always=fixed_shapes))
        )
        first, token = last, tokens.stop
    return groups


def _end_of_group(held: Sequence[int], lengths: Sequence[int], first: int, max_keys: int) -> int:
    """Where the group of `first` ends for the sake of padding."""
    last, real = first + 1, held[first] + lengths[first]
    most = real
    while last < len(held):
        end, queries = held[last] + lengths[last], lengths[last]
        longest = max(most, end)
        if longest * (last + 1 - first) > max_keys:
            break
        padded, wanted = longest * (last + 1 - first) * queries, (real + end) * queries
        if padded > wanted * (1 + MAX_PADDING_FRACTION) + FREE_PADDING_KEYS or queries > 1.5 * lengths[first]:
            break
        last, real, most = last + 1, real + end, longest
    return last


def _end_of_same_shape(held: Sequence[int], lengths: Sequence[int], first: int, block_size: int) -> int:
    def shape(i: int) -> tuple[int, int, bool]:
        return lengths[i], -(-(held[i] + lengths[i]) // block_size), not held[i]

    last = first + 1
    while last < len(held) and shape(last) == shape(first):
        last += 1
    return last


def _group(
    held: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    whole_blocks: bool,
) -> Group:
    rows, queries = len(held), max(lengths)
    starts, counts = np.array(held), np.array(lengths)
    keys = int((starts + counts).max())
    columns = -(-keys // block_size)
    blocks = np.zeros((rows, columns), dtype=np.int64)
    for row, table in enumerate(tables):
        few = table[:columns]
        blocks[row, : len(few)] = few
    padded = real = None
    if counts.min() < queries:
        place = np.arange(queries)
        inside = np.minimum(place, counts[:, None] - 1)
        offsets = np.concatenate([[0], counts.cumsum()[:-1]])
        padded = torch.from_numpy((offsets[:, None] + inside).ravel())
        real = torch.from_numpy(np.flatnonzero(place < counts[:, None]))
    causal = not starts.any() and queries > 1
    keys = columns * block_size if whole_blocks and not causal else keys
    where = torch.from_numpy(blocks.ravel())
    return Group(slice(0), rows, queries, padded, real, where, keys, None, causal)


def _mask(
    group: Group, held: Sequence[int], queries_per_kv_head: int, dtype: torch.dtype, *, always: bool
) -> Tensor | None:
    """The heads that share keys are further queries, one after the other."""
    if group.causal or (group.queries == 1 and not always and min(held) + 1 == group.keys):
        return None
    places = torch.tensor(held)[:, None] + torch.arange(group.queries)
    hidden = places[:, :, None] < torch.arange(group.keys)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return (
        mask[:, None]
        .expand(-1, queries_per_kv_head, -1, -1)
        .reshape(group.rows, 1, queries_per_kv_head * group.queries, group.keys)
    )
