"""Decoding on a CPU: what each request attends to lies in a window of its own, kept from step to step.

Small models are fast enough there for everything around them to count. So a Llama or Qwen's own parameters are called
directly, many steps at a time, and keys and values are not gathered from their blocks for each of them: a window is
filled once and grows by a token a step, which its block gets when the steps are done. Prompts go the stock way.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.engine import sampler
from toolwise.engine.blocks import Lease
from toolwise.engine.cpu_forward import AttentionFn, CpuForward, rope_per_step
from toolwise.engine.request import Request
from toolwise.engine.runner import Runner

SPARE_TOKENS = 64
"""Tokens that a window has room for beyond what is held when it is given: moving takes time."""
MAX_WINDOW_BYTES = 2 << 30
"""Of all windows, and never more than a quarter of the memory that is free."""
DecodedSteps = tuple[list[list[int]], list[list[float]]]
"""Tokens and log-probs of each request."""


@dataclass(slots=True)
class KVWindows:
    """Windows of one width."""

    width: int
    windows: list[Tensor]
    """Keys of each layer, then values: [rows, width, heads, size]."""
    leases: list[Lease | None]
    """Whose window a row is."""
    filled: list[int]
    """How many of its tokens are in it."""

    @classmethod
    def of(cls, width: int, windows: list[Tensor]) -> KVWindows:
        rows = len(windows[0])
        return cls(width, windows, [None] * rows, [0] * rows)

    def assign_rows(self, requests: Sequence[Request]) -> list[Request]:
        """In the order of the rows that they get, the first ones: whoever has one of these keeps it."""
        owners = {id(lease): row for row, lease in enumerate(self.leases[: len(requests)]) if lease is not None}
        rows: dict[int, Request] = {}
        new = []
        for request in requests:
            row = owners.get(id(request.lease))
            if row is None:
                new.append(request)
            else:
                rows[row] = request
        free = (row for row in range(len(requests)) if row not in rows)
        for request, row in zip(new, free, strict=True):
            rows[row] = request
            self.leases[row], self.filled[row] = request.lease, 0
        return [rows[row] for row in range(len(requests))]


@dataclass(slots=True)
class WindowBatch:
    """The requests on one shelf, for some steps."""

    kv_windows: KVWindows
    requests: list[Request]
    rows: slice
    """Where they stand in the batch."""
    held: list[int]
    write_offsets: Tensor = field(init=False)
    """Where their next token goes, in all windows end to end."""
    mask: Tensor | None = field(init=False, default=None)
    """[rows, width], 0 for keys to be seen; None where all have as many."""

    def __post_init__(self) -> None:
        held, width = torch.tensor(self.held), self.kv_windows.width
        self.write_offsets = torch.arange(len(held)) * width + held
        if min(self.held) != max(self.held):
            hidden = torch.arange(width) >= held[:, None]
            self.mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


class CpuRunner(Runner):
    """As `Runner`, and many steps at once where all that is to do is to decode."""

    max_decode_steps = 32

    def __init__(self, model: Any, block_size: int, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__(model, block_size)
        self.head = head
        self._windows_by_width: dict[int, KVWindows] = {}

    def release(self) -> None:
        super().release()
        self._windows_by_width = {}

    @staticmethod
    def supports(request: Request) -> bool:
        plain = request.kind == "generate" and not request.stop_strings and request.logits_mask is None
        return plain and request.pending == 1 and request.sampled > 0

    def has_room(self, requests: Sequence[Request]) -> bool:
        """For windows of all."""
        a_token = self.block_bytes // self.block_size
        held = sum(kv_windows.width * len(kv_windows.leases) for kv_windows in self._windows_by_width.values())
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 + held * a_token
        return sum(_bucket_width(request.held + SPARE_TOKENS) for request in requests) * a_token <= min(
            MAX_WINDOW_BYTES, free
        )

    @torch.inference_mode()
    def decode_multi_step(
        self, requests: Sequence[Request], steps: int, interrupted: Callable[[], bool]
    ) -> DecodedSteps:
        """`steps` of each at most: until the first of them is done, or somebody else wants something."""
        parts = self._assign_windows(requests)
        seated = [request for part in parts for request in part.requests]
        steps = min(steps, *(part.kv_windows.width - max(part.held) for part in parts))
        tokens: list[list[int]] = []
        logprobs: list[list[float]] = []
        ids = [request.tokens[-1] for request in seated]
        samplings, drawn = [request.sampling for request in seated], [request.sampled for request in seated]
        steps = min(steps, *(s.max_new_tokens - count for s, count in zip(samplings, drawn, strict=True)))
        ropes = rope_per_step(self.trunk, np.concatenate([part.held for part in parts]), steps)
        lean = CpuForward(self.trunk)
        for step in range(steps):
            states = lean.forward(torch.tensor(ids), ropes[step], self._attend(parts, step))
            found, figures = sampler.draw(self.head(states), samplings, [count + step for count in drawn])
            ids = found.tolist()
            tokens.append(ids)
            logprobs.append(figures.tolist())
            if interrupted() or any(i in s.stop_token_ids for i, s in zip(ids, samplings, strict=True)):
                break
        for part in parts:
            self._copy_kv(part, part.held, [held + len(tokens) for held in part.held], to_blocks=True)
        row_of = {request: row for row, request in enumerate(seated)}
        rows = [row_of[request] for request in requests]
        return [[step[row] for step in tokens] for row in rows], [[step[row] for step in logprobs] for row in rows]

    def _attend(self, parts: Sequence[WindowBatch], step: int) -> AttentionFn:
        """Attention of one step: the new token joins its window, then each sees its window."""
        queries_per_kv_head, width = self.heads // self.key_heads, self.key_heads * self.head_size
        views = []
        for part in parts:
            places, keys = part.write_offsets + step, max(part.held) + step + 1
            mask = None
            if part.mask is not None:
                part.mask.view(-1)[places] = 0.0
                mask = part.mask[:, None, None, :keys].expand(-1, 1, queries_per_kv_head, -1)
            views.append((part, places, keys, mask))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            outs = []
            for part, places, keys, mask in views:
                count = len(part.held)
                pair = part.kv_windows.windows[layer], part.kv_windows.windows[self.layers + layer]
                for window, new in zip(pair, (key, value), strict=True):
                    window.view(-1, width).index_copy_(0, places, new[part.rows].reshape(count, width))
                k, v = (window[:count, :keys].transpose(1, 2) for window in pair)
                q = query[part.rows].view(count, self.key_heads, queries_per_kv_head, self.head_size)
                outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
            return (outs[0] if len(outs) == 1 else torch.cat(outs)).view(len(query), -1)

        return attend

    def _assign_windows(self, requests: Sequence[Request]) -> list[WindowBatch]:
        """Everybody in a window of a fitting width, with all that is computed of theirs in it."""
        homes = {
            id(lease): width
            for width, kv_windows in self._windows_by_width.items()
            for lease in kv_windows.leases
            if lease
        }
        by_width: dict[int, list[Request]] = defaultdict(list)
        for request in requests:
            home = homes.get(id(request.lease), 0)
            by_width[home if home > request.held else _bucket_width(request.held + SPARE_TOKENS)].append(request)
        kept, self._windows_by_width = self._windows_by_width, {}
        parts, first = [], 0
        for width, members in by_width.items():
            kv_windows = kept.get(width)
            if kv_windows is None or len(kv_windows.leases) < len(members):
                shape = (1 << (len(members) - 1).bit_length(), width, self.key_heads, self.head_size)
                kv_windows = KVWindows.of(width, [self._zeros(shape) for _ in range(2 * self.layers)])
            self._windows_by_width[width] = kv_windows
            seated = kv_windows.assign_rows(members)
            part = WindowBatch(
                kv_windows, seated, slice(first, first + len(seated)), [request.held for request in seated]
            )
            self._copy_kv(part, kv_windows.filled, part.held)
            parts.append(part)
            first += len(seated)
        return parts

    def _copy_kv(
        self, part: WindowBatch, begins: Sequence[int], ends: Sequence[int], *, to_blocks: bool = False
    ) -> None:
        """Keys and values of some tokens of each request, from blocks to windows or back."""
        spans = [(row, np.arange(*span)) for row, span in enumerate(zip(begins, ends, strict=False))]
        size, kv_windows = self.block_size, part.kv_windows
        tables = [np.array(_block_table(request)) for request in part.requests]
        in_windows = torch.from_numpy(np.concatenate([row * kv_windows.width + at for row, at in spans]))
        in_blocks = torch.from_numpy(np.concatenate([tables[row][at // size] * size + at % size for row, at in spans]))
        kv_windows.filled[: len(ends)] = ends
        if not len(in_windows):
            return
        for window, cached in zip(kv_windows.windows, (*self.keys, *self.values), strict=True):
            here, there = window.flatten(0, 1).flatten(1), cached.flatten(0, 1).flatten(1)
            if to_blocks:
                there.index_copy_(0, in_blocks, here.index_select(0, in_windows))
            else:
                here.index_copy_(0, in_windows, there.index_select(0, in_blocks))


def _bucket_width(tokens: int) -> int:
    """The next of few widths, each a quarter more than the one before: as much of a window may be padding."""
    width = 64
    while width < tokens:
        width = -(-width * 5 // 64) * 16
    return width


def _block_table(request: Request) -> list[int]:
    assert request.lease is not None
    return request.lease.table
