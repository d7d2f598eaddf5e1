"""Groups the chunks of a batch by length for attention on a CPU, so that little of each call is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

MAX_PADDING_FRACTION = 0.25
"""Fraction of a group's keys that may be padding before a separate call is cheaper."""
FREE_PADDING_KEYS = 512
"""Padding up to this many keys costs no more than a separate call."""
MAX_GROUP_KEY_BYTES = 3 << 19
"""Keys of one layer that a group gathers at most: they are still in the CPU cache when they are read."""


@dataclass(slots=True)
class Group:
    """Chunks that attend in one call: `tokens` of the row, as [rows, queries], to blocks [rows, columns]."""

    tokens: slice
    rows: int
    queries: int
    padded: Tensor | None
    """[rows * queries] index of each query in `tokens`, if chunks differ in length."""
    real: Tensor | None
    """Indices of the queries that are not padding."""
    blocks: Tensor
    """[rows * columns]"""
    keys: int
    """Number of keys of these blocks that any query sees."""
    mask: Tensor | None
    """[rows, 1, queries, keys], 0 where a query sees a key; None if all see all, or if attention is purely causal."""
    causal: bool
    held: Tensor
    """[rows]: keys before each row's first query."""
    block_size: int
    fixed_shapes: bool = False
    _views: dict[int | None, KeyView] = field(default_factory=dict)

    def view(self, window: int | None, dtype: torch.dtype) -> KeyView:
        """The keys that the queries see within a sliding window, and a mask that says so; built once for all layers."""
        if window not in self._views:
            # With fixed shapes, the fewest keys that a row of as many blocks may hold: other rows must not matter.
            held = self.keys - self.block_size + 1 - self.queries if self.fixed_shapes else int(self.held.min())
            skipped = 0 if window is None else max(0, held + 1 - window) // self.block_size
            blocks = self.blocks.view(self.rows, -1)[:, skipped:].reshape(-1)
            keys = self.keys - skipped * self.block_size
            positions = self.held[:, None] + torch.arange(self.queries, device=self.held.device)
            distance = positions[:, :, None] - torch.arange(
                skipped * self.block_size, self.keys, device=positions.device
            )
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._views[window] = KeyView(blocks, keys, mask[:, None])
        return self._views[window]


@dataclass(frozen=True, slots=True)
class KeyView:
    """Keys of a group, with an explicit mask."""

    blocks: Tensor
    """[rows * columns]"""
    keys: int
    mask: Tensor
    """[rows, 1, queries, keys]"""


def chunk_order(chunks: Sequence[tuple[int, int]]) -> list[int]:
    """The order of the (held, length) chunks in the row, so that each group is contiguous."""
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
    device: torch.device | None = None,
) -> list[Group]:
    """Group neighbouring chunks with little padding, up to `max_keys` per group of several. `queries_per_kv_head`:
    query heads per key head. With `fixed_shapes` the shape of a computation depends only on the chunk itself, so that
    the rest of the batch cannot change its result."""
    groups: list[Group] = []
    first = token = 0
    while first < len(held):
        last = (
            _end_of_same_shape(held, lengths, first, block_size)
            if fixed_shapes
            else _end_of_group(held, lengths, first, max_keys)
        )
        members = slice(first, last)
        tokens = slice(token, token + sum(lengths[members]))
        group = _group(tokens, held[members], lengths[members], tables[members], block_size, whole_blocks=fixed_shapes)
        group.mask = _mask(group, held[members], queries_per_kv_head, dtype, always=fixed_shapes)
        groups.append(group if device is None or device.type == "cpu" else _on_device(group, device))
        first, token = last, tokens.stop
    return groups


def _end_of_group(held: Sequence[int], lengths: Sequence[int], first: int, max_keys: int) -> int:
    """End of the group that starts at `first`, chosen to limit padding."""
    last, real = first + 1, held[first] + lengths[first]
    longest_so_far = real
    while last < len(held):
        keys, queries = held[last] + lengths[last], lengths[last]
        longest = max(longest_so_far, keys)
        if longest * (last + 1 - first) > max_keys:
            break
        padded, useful = longest * (last + 1 - first) * queries, (real + keys) * queries
        if padded > useful * (1 + MAX_PADDING_FRACTION) + FREE_PADDING_KEYS or queries > 1.5 * lengths[first]:
            break
        last, real, longest_so_far = last + 1, real + keys, longest
    return last


def _end_of_same_shape(held: Sequence[int], lengths: Sequence[int], first: int, block_size: int) -> int:
    def shape(i: int) -> tuple[int, int, bool]:
        return lengths[i], -(-(held[i] + lengths[i]) // block_size), not held[i]

    last = first + 1
    while last < len(held) and shape(last) == shape(first):
        last += 1
    return last


def _group(
    tokens: slice,
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
        used = table[:columns]
        blocks[row, : len(used)] = used
    padded = real = None
    if counts.min() < queries:
        index = np.arange(queries)
        clipped = np.minimum(index, counts[:, None] - 1)
        offsets = np.concatenate([[0], counts.cumsum()[:-1]])
        padded = torch.from_numpy((offsets[:, None] + clipped).ravel())
        real = torch.from_numpy(np.flatnonzero(index < counts[:, None]))
    causal = not starts.any() and queries > 1
    keys = columns * block_size if whole_blocks and not causal else keys
    flat = torch.from_numpy(blocks.ravel())
    first = torch.from_numpy(starts)
    return Group(tokens, rows, queries, padded, real, flat, keys, None, causal, first, block_size, whole_blocks)


def _on_device(group: Group, device: torch.device) -> Group:
    for name in ("padded", "real", "blocks", "mask", "held"):
        tensor = getattr(group, name)
        setattr(group, name, None if tensor is None else tensor.to(device))
    return group


def _mask(
    group: Group, held: Sequence[int], queries_per_kv_head: int, dtype: torch.dtype, *, always: bool
) -> Tensor | None:
    """Query heads that share a key head are laid out as additional queries."""
    if group.causal or (group.queries == 1 and not always and min(held) + 1 == group.keys):
        return None
    positions = torch.tensor(held)[:, None] + torch.arange(group.queries)
    hidden = positions[:, :, None] < torch.arange(group.keys)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return (
        mask[:, None]
        .expand(-1, queries_per_kv_head, -1, -1)
        .reshape(group.rows, 1, queries_per_kv_head * group.queries, group.keys)
    )
