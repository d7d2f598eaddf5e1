"""Decoding many steps ahead on a GPU: one step captured as a CUDA graph and replayed with nobody in between.

A step feeds the next on the device (token, position, slot), and whoever draws a stop token or its last one stands
still there. The CPU schedules once for many steps, and a launch costs next to nothing. Without a GPU the same step runs
uncaptured, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.engine.request import Request
from toolwise.engine.runner import padded_tables
from toolwise.engine.shared_prefixes import PrefixGroup, prefix_groups
from toolwise.kernels import kernel
from toolwise.kernels.host_to_device import to_device
from toolwise.kernels.llama import FusedDecoder, PagedCache, PrefixGroups

MAX_DECODE_STEPS = 128
"""Of one load: what the device is told takes the CPU as long as several steps take the device."""
POLL_INTERVAL_STEPS = 32
"""Steps between two looks at the news: what a newcomer waits at most, or who is done, or who gives up."""
MAX_STOP_TOKENS = 8
"""Stop tokens of a request that the device knows; whoever has more decodes step by step."""
MIN_SHARED_FRACTION = 0.2
"""Share of the keys that must be saved for the two launches more of shared prefixes."""
ROW_FIELDS = ("ids", "positions", "prefix", "seeds", "drawn", "limits", "greedy", "active")
Shape = tuple[int, int, int]
"""Rows, groups and members of the largest group, each padded; no groups where nothing is shared."""


@dataclass(slots=True)
class _DecodeState:
    """What a step reads and writes, at addresses that stay: rows up to the most requests there can be."""

    fields: dict[str, Tensor]
    """int64, one a row."""
    stops: Tensor
    temperatures: Tensor
    tables: Tensor
    prefix_tables: Tensor
    prefix_lengths: Tensor
    member_starts: Tensor
    members: Tensor
    tokens: Tensor
    """[steps, rows]: -1 where a row stood still."""
    logprobs: Tensor
    step: Tensor

    @classmethod
    def of(cls, rows: int, columns: int, device: torch.device) -> _DecodeState:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        small = torch.int32
        return cls(
            {name: zeros(rows) for name in ROW_FIELDS},
            zeros(rows, MAX_STOP_TOKENS),
            zeros(rows, dtype=torch.float32) + 1.0,
            zeros(rows, columns, dtype=small),
            zeros(rows, columns, dtype=small),
            zeros(rows, dtype=small),
            zeros(rows + 1, dtype=small),
            zeros(rows, dtype=small),
            zeros(MAX_DECODE_STEPS, rows),
            zeros(MAX_DECODE_STEPS, rows, dtype=torch.float32),
            zeros(1),
        )


class MultiStepDecoder:
    """Steps for up to `rows` requests whose caches have `columns` blocks at most."""

    def __init__(
        self, fused: FusedDecoder, cache: PagedCache, head: Callable[[Tensor], Tensor], *, rows: int, columns: int
    ) -> None:
        self.fused, self.cache, self.head = fused, cache, head
        self.block_size = cache.keys[0].shape[1]
        self.device = cache.keys[0].device
        self.rows = rows
        self._state = _DecodeState.of(rows, columns, self.device)
        self._sample = kernel("sample", self.device)
        self._send = partial(to_device, device=self.device)
        self.shapes: set[Shape] = set()
        self._graphs: dict[Shape, Any] = {}
        self._pool: Any = None

    @staticmethod
    def supports(request: Request) -> bool:
        return (
            request.kind == "generate"
            and request.pending == 1
            and not request.stop_strings
            and request.logits_mask is None
            and len(request.sampling.stop_token_ids) <= MAX_STOP_TOKENS
        )

    @torch.inference_mode()
    def run(
        self, requests: Sequence[Request], steps: int, interrupted: Callable[[], bool]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probs of each request: `steps` of them, or up to and with its last; fewer where somebody is
        done, who should hear of it, or somebody else wants something."""
        shape = self._load(requests)
        self.shapes.add(shape)
        step = self._graph(shape)
        count, taken = len(requests), 0
        while taken < steps:
            for _ in range(min(POLL_INTERVAL_STEPS, steps - taken)):
                step()
            taken = min(steps, taken + POLL_INTERVAL_STEPS)
            if taken < steps and (interrupted() or self._count_active(count) < count):
                break
        tokens = self._state.tokens[:taken, :count].cpu().numpy()
        logprobs = self._state.logprobs[:taken, :count].cpu().numpy()
        drawn = (tokens >= 0).sum(0)
        return (
            [tokens[:n, i].tolist() for i, n in enumerate(drawn)],
            [logprobs[:n, i].tolist() for i, n in enumerate(drawn)],
        )

    def _count_active(self, count: int) -> int:
        """How many are not done yet; waits for the device."""
        return int(self._state.fields["active"][:count].sum())

    # --- what a step is

    def _step(self, shape: Shape) -> None:
        rows, groups, members = shape
        s = self._state
        f = {name: field[:rows] for name, field in s.fields.items()}
        active, positions, tables = f["active"] > 0, f["positions"], s.tables[:rows]
        own = positions - f["prefix"]
        block = tables.gather(1, (own // self.block_size)[:, None]).squeeze(1).long()
        slots = torch.where(active, block * self.block_size + positions % self.block_size, -1)
        lengths = torch.where(active, own + 1, 0).int()
        prefixes = None
        if groups:
            prefixes = PrefixGroups(
                s.prefix_tables[:groups], s.prefix_lengths[:groups], s.member_starts[: groups + 1], s.members[:rows],
                members,
            )  # fmt: skip
        hidden = self.fused.forward_decode(f["ids"], positions, self.cache, slots, tables, lengths, prefixes)
        tokens, logprobs = self._sample(
            self.head(hidden), s.temperatures[:rows], f["seeds"], f["drawn"], f["greedy"] > 0
        )
        s.tokens[:, :rows].index_copy_(0, s.step, torch.where(active, tokens, -1)[None])
        s.logprobs[:, :rows].index_copy_(0, s.step, logprobs[None])
        f["drawn"] += active
        f["positions"] += active
        f["ids"].copy_(torch.where(active, tokens, f["ids"]))
        going = (tokens[:, None] != s.stops[:rows]).all(1) & (f["drawn"] < f["limits"])
        f["active"].copy_(active & going)
        s.step += 1

    def _graph(self, shape: Shape) -> Callable[[], None]:
        if self.device.type != "cuda":
            return lambda: self._step(shape)
        if shape not in self._graphs:
            before = {name: field.clone() for name, field in self._state.fields.items()}
            side: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # kernels are compiled, and libraries make their plans, before the capture
                self._state.fields["active"].zero_()
                self._step(shape)
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(shape)
            self._pool = self._pool or graph.pool()
            self._graphs[shape] = graph
            for name, field in self._state.fields.items():
                field.copy_(before[name])
            self._state.step.zero_()
        replay: Callable[[], None] = self._graphs[shape].replay
        return replay

    # --- what it begins with

    def _load(self, requests: Sequence[Request]) -> Shape:
        tables = [_block_table(r) for r in requests]
        full = [r.held // self.block_size for r in requests]
        groups = prefix_groups(tables, full)
        if sum(group.saved_reads for group in groups) < MIN_SHARED_FRACTION * sum(full):
            groups = []
        shape = self._shape(len(requests), groups)
        prefix = np.zeros(len(requests), dtype=np.int64)
        for group in groups:
            prefix[list(group.members)] = group.blocks
        self._load_rows(requests, prefix * self.block_size, shape[0])
        own = padded_tables([table[p:] for table, p in zip(tables, prefix, strict=True)])
        self._state.tables[: len(own), : own.shape[1]].copy_(self._send(own))
        if groups:
            self._load_groups(tables, groups, shape)
        self._state.step.zero_()
        return shape

    def _load_rows(self, requests: Sequence[Request], prefix: Any, rows: int) -> None:
        count = len(requests)
        values = {
            "ids": [r.tokens[-1] for r in requests],
            "positions": [r.held for r in requests],
            "prefix": prefix,
            "seeds": np.array([r.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF for r in requests], dtype=np.uint64).view("i8"),
            "drawn": [r.sampled for r in requests],
            "limits": [r.sampling.max_new_tokens for r in requests],
            "greedy": [not r.sampling.do_sample for r in requests],
            "active": [1] * count,
        }
        packed = np.zeros((len(ROW_FIELDS) + MAX_STOP_TOKENS, rows), dtype=np.int64)
        for place, name in enumerate(ROW_FIELDS):
            packed[place, :count] = values[name]
        packed[len(ROW_FIELDS) :] = -1
        for row, request in enumerate(requests):
            stops = request.sampling.stop_token_ids
            packed[len(ROW_FIELDS) : len(ROW_FIELDS) + len(stops), row] = stops
        there = self._send(packed)
        for place, name in enumerate(ROW_FIELDS):
            self._state.fields[name][:rows].copy_(there[place])
        self._state.stops[:rows].copy_(there[len(ROW_FIELDS) :].T)
        temperatures = np.ones(rows, dtype=np.float32)
        temperatures[:count] = [r.sampling.temperature for r in requests]
        self._state.temperatures[:rows].copy_(self._send(temperatures))

    def _load_groups(self, tables: Sequence[Sequence[int]], groups: Sequence[PrefixGroup], shape: Shape) -> None:
        """Rows that only pad the step are groups of one that share nothing."""
        rows, count, _ = shape
        alone = [(row,) for row in range(len(tables), rows)]
        members = [*(group.members for group in groups), *alone]
        starts = np.cumsum([0, *(len(m) for m in members), *[0] * (count - len(members))])
        width = max(group.blocks for group in groups)
        prefixes = np.zeros((count, width), dtype=np.int32)
        lengths = np.zeros(count, dtype=np.int32)
        for place, group in enumerate(groups):
            prefixes[place, : group.blocks] = tables[group.members[0]][: group.blocks]
            lengths[place] = group.blocks * self.block_size
        s = self._state
        s.prefix_tables[:count, :width].copy_(self._send(prefixes))
        s.prefix_lengths[:count].copy_(self._send(lengths))
        s.member_starts[: count + 1].copy_(self._send(starts.astype(np.int32)))
        s.members[:rows].copy_(self._send(np.array([i for m in members for i in m], dtype=np.int32)))

    def _shape(self, count: int, groups: Sequence[PrefixGroup]) -> Shape:
        rows = min(self.rows, _bucket_size(count))
        if not groups:
            return rows, 0, 0
        wanted = len(groups) + rows - count
        return rows, min(rows, _bucket_size(wanted)), _bucket_size(max(len(group.members) for group in groups))


def _bucket_size(count: int) -> int:
    """The next of few sizes: powers of two, then steps of 32. Each has a graph of its own."""
    if count <= 32:
        return 1 << (count - 1).bit_length()
    return -(-count // 32) * 32


def _block_table(request: Request) -> list[int]:
    assert request.lease is not None
    return request.lease.table
