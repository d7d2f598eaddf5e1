"""Contiguous keys and values of the requests that decode on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolwise.engine.blocks import Lease
from toolwise.engine.request import Request


@dataclass(slots=True)
class KVWindows:
    """Windows of one width."""

    width: int
    windows: list[Tensor]
    """Keys of each layer, then values: [rows, heads, width, size]."""
    leases: list[Lease | None]
    """The owner of each row."""
    filled: list[int]
    """Number of tokens in each row."""

    @classmethod
    def of(cls, width: int, windows: list[Tensor]) -> KVWindows:
        rows = len(windows[0])
        return cls(width, windows, [None] * rows, [0] * rows)

    def assign_rows(self, requests: Sequence[Request]) -> list[Request]:
        """Assign the first rows to `requests` and return these in row order; a request that has such a row keeps it."""
        owners = {id(lease): row for row, lease in enumerate(self.leases[: len(requests)]) if lease is not None}
        rows: dict[int, Request] = {}
        unassigned = []
        for request in requests:
            row = owners.get(id(request.lease))
            if row is None:
                unassigned.append(request)
            else:
                rows[row] = request
        free = (row for row in range(len(requests)) if row not in rows)
        for request, row in zip(unassigned, free, strict=True):
            rows[row] = request
            self.leases[row], self.filled[row] = request.lease, 0
        return [rows[row] for row in range(len(requests))]


@dataclass(slots=True)
class WindowBatch:
    """The requests whose windows have one width, for some steps."""

    kv_windows: KVWindows
    requests: list[Request]
    rows: slice
    """Their rows in the batch."""
    held: list[int]
    write_offsets: Tensor = field(init=False)
    """[rows * heads]: where each next token goes, in all windows of all heads laid end to end."""
    mask_offsets: Tensor = field(init=False)
    """[rows]: the same in the mask."""
    mask: Tensor | None = field(init=False, default=None)
    """[rows, width], 0 for visible keys and -inf for the rest; None if all rows have the same length."""

    def __post_init__(self) -> None:
        held, width = torch.tensor(self.held), self.kv_windows.width
        heads = self.kv_windows.windows[0].shape[1]
        self.mask_offsets = torch.arange(len(held)) * width + held
        self.write_offsets = (torch.arange(len(held) * heads) * width).view(-1, heads).add_(held[:, None]).view(-1)
        if min(self.held) != max(self.held):
            hidden = torch.arange(width) >= held[:, None]
            self.mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def visible(self, step: int, window: int | None, queries: int) -> VisibleKeys:
        """The keys that each request's next token sees, `step` steps after the first."""
        longest, shortest = max(self.held) + step + 1, min(self.held) + step + 1
        if window is None or window >= longest:
            mask = None if self.mask is None else self.mask[:, None, None, :longest].expand(-1, 1, queries, -1)
            return 0, longest, mask
        first = max(0, shortest - window)
        if shortest == longest:
            return first, longest, None
        distance = torch.tensor(self.held)[:, None] + step - torch.arange(first, longest)
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return first, longest, mask[:, None, None].expand(-1, 1, queries, -1)


VisibleKeys = tuple[int, int, Tensor | None]
"""First and last key of a window that any row sees, and a mask if not all rows see all of them."""


def bucket_width(tokens: int) -> int:
    """Round up to one of a few widths, each a quarter larger than the previous: this bounds the padding."""
    width = 64
    while width < tokens:
        width = -(-width * 5 // 64) * 16
    return width
