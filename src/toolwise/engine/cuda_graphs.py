"""Decodes many steps ahead on a GPU: one step is captured as a CUDA graph and replayed without CPU work in between.

Each step feeds the next on the device (token, position, slot). A row that samples a stop token or reaches its limit
becomes inactive there. The CPU schedules once for many steps, and a launch costs next to nothing. Without a GPU the
same step runs uncaptured, which is how it is tested.
"""

from __future__ import annotations

import threading
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
from toolwise.kernels.fused_decoder import FusedDecoder, PagedCache, PrefixGroups
from toolwise.kernels.host_to_device import to_device
from toolwise.kernels.streams import stream_for

MAX_DECODE_STEPS = 512
"""Steps per load: loading the state and recording the results take the CPU as long as tens of steps take the device,
which waits meanwhile."""
POLL_INTERVAL_STEPS = 32
"""Steps between checks for new, finished or cancelled requests: the longest such a request waits."""
MAX_STOP_TOKENS = 8
"""Stop tokens per request that fit on the device; a request with more decodes step by step."""
MIN_SHARED_FRACTION = 0.2
"""Fraction of key reads that must be saved to pay for the two extra launches of shared prefixes."""
CAPTURE = threading.Lock()
"""Held during a capture, and by those who use the device beside the engine: see device_streams.py."""
ROW_FIELDS = ("ids", "positions", "prefix", "seeds", "sampled", "limits", "greedy", "active")
Shape = tuple[int, int, int]
"""Rows, groups and members of the largest group, each padded; 0 groups if nothing is shared."""


@dataclass(slots=True)
class _DecodeState:
    """Inputs and outputs of a step at fixed addresses, with a row for each possible request."""

    fields: dict[str, Tensor]
    """int64, one value per row."""
    stops: Tensor
    temperatures: Tensor
    tables: Tensor
    prefix_tables: Tensor
    prefix_lengths: Tensor
    member_starts: Tensor
    members: Tensor
    tokens: Tensor
    """[steps, rows]: -1 where a row was inactive."""
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
    """Decodes up to `rows` requests with at most `columns` blocks each."""

    def __init__(
        self, fused: FusedDecoder, cache: PagedCache, head: Callable[[Tensor], Tensor], *, rows: int, columns: int
    ) -> None:
        self.fused, self.cache, self.head = fused, cache, head
        self.block_size = cache.keys[0].shape[1]
        self.device = cache.keys[0].device
        self.rows = rows
        self._state = _DecodeState.of(rows, columns, self.device)
        self._sample = kernel("sample", self.device)
        self._begin_step, self._end_step = (kernel(name, self.device) for name in ("begin_step", "end_step"))
        self._send = partial(to_device, device=self.device)
        self.shapes: set[Shape] = set()
        self._graphs: dict[Shape, Any] = {}
        self._pool: Any = None

    @staticmethod
    def supports(request: Request) -> bool:
        few_stops = len(request.sampling.stop_token_ids) <= MAX_STOP_TOKENS
        return request.decodes_freely and few_stops and not request.options.truncates

    @torch.inference_mode()
    def run(
        self, requests: Sequence[Request], steps: int, interrupted: Callable[[], bool]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probs per request: `steps` of them, or up to and including its last; fewer if a request is
        done and should be reported, or if `interrupted`."""
        shape = self._load(requests)
        self.shapes.add(shape)
        step = self._graph(shape)
        count, done = len(requests), 0
        while done < steps:
            for _ in range(min(POLL_INTERVAL_STEPS, steps - done)):
                step()
            done = min(steps, done + POLL_INTERVAL_STEPS)
            # The sum waits for the device.
            if done < steps and (interrupted() or int(self._state.fields["active"][:count].sum()) < count):
                break
        tokens = self._state.tokens[:done, :count].cpu().numpy()
        logprobs = self._state.logprobs[:done, :count].cpu().numpy()
        counts = (tokens >= 0).sum(0)
        return (
            [tokens[:n, i].tolist() for i, n in enumerate(counts)],
            [logprobs[:n, i].tolist() for i, n in enumerate(counts)],
        )

    # --- the step

    def _step(self, shape: Shape) -> None:
        rows, groups, members = shape
        s = self._state
        f = {name: field[:rows] for name, field in s.fields.items()}
        tables = s.tables[:rows]
        slots, lengths = self._begin_step(f["positions"], f["prefix"], f["active"], tables, self.block_size)
        prefixes = None
        if groups:
            prefixes = PrefixGroups(
                s.prefix_tables[:groups], s.prefix_lengths[:groups], s.member_starts[: groups + 1], s.members[:rows],
                members,
            )  # fmt: skip
        hidden = self.fused.forward_decode(f["ids"], f["positions"], self.cache, slots, tables, lengths, prefixes)
        tokens, logprobs = self._sample(self.head(hidden), s.temperatures[:rows], f["seeds"], f["sampled"], f["greedy"])
        moved = (f[name] for name in ("ids", "positions", "sampled", "limits", "active"))
        self._end_step(tokens, logprobs, s.stops[:rows], *moved, s.step, s.tokens, s.logprobs)

    def _graph(self, shape: Shape) -> Callable[[], None]:
        if self.device.type != "cuda":
            return lambda: self._step(shape)
        if shape not in self._graphs:
            with CAPTURE:
                self._graphs[shape] = self._captured(shape)
        replay: Callable[[], None] = self._graphs[shape].replay
        return replay

    def _captured(self, shape: Shape) -> Any:
        saved = {name: field.clone() for name, field in self._state.fields.items()}
        stream = stream_for("warm-up", self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # warm up: compile kernels and let libraries plan before the capture
            self._state.fields["active"].zero_()
            self._step(shape)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        target = stream_for("capture", self.device)
        with torch.cuda.graph(graph, pool=self._pool, stream=target, capture_error_mode="thread_local"):
            self._step(shape)
        self._pool = self._pool or graph.pool()
        for name, field in self._state.fields.items():
            field.copy_(saved[name])
        self._state.step.zero_()
        return graph

    # --- loading the state

    def _load(self, requests: Sequence[Request]) -> Shape:
        tables = [r.lease.table for r in requests]
        full = [r.held // self.block_size for r in requests]
        groups = prefix_groups(tables, full)
        if sum(group.saved_reads for group in groups) < MIN_SHARED_FRACTION * sum(full):
            groups = []
        shape = self._shape(len(requests), groups)
        prefix = np.zeros(len(requests), dtype=np.int64)
        for group in groups:
            prefix[list(group.members)] = group.blocks
        self._load_rows(requests, prefix * self.block_size, shape[0])
        tails = padded_tables([table[p:] for table, p in zip(tables, prefix, strict=True)])
        self._state.tables[: len(tails), : tails.shape[1]].copy_(self._send(tails))
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
            "sampled": [r.sampled for r in requests],
            "limits": [r.sampling.max_new_tokens for r in requests],
            "greedy": [not r.sampling.do_sample for r in requests],
            "active": [1] * count,
        }
        packed = np.zeros((len(ROW_FIELDS) + MAX_STOP_TOKENS, rows), dtype=np.int64)
        for index, name in enumerate(ROW_FIELDS):
            packed[index, :count] = values[name]
        packed[len(ROW_FIELDS) :] = -1
        for row, request in enumerate(requests):
            stops = request.sampling.stop_token_ids
            packed[len(ROW_FIELDS) : len(ROW_FIELDS) + len(stops), row] = stops
        on_device = self._send(packed)
        for index, name in enumerate(ROW_FIELDS):
            self._state.fields[name][:rows].copy_(on_device[index])
        self._state.stops[:rows].copy_(on_device[len(ROW_FIELDS) :].T)
        temperatures = np.ones(rows, dtype=np.float32)
        temperatures[:count] = [r.sampling.temperature for r in requests]
        self._state.temperatures[:rows].copy_(self._send(temperatures))

    def _load_groups(self, tables: Sequence[Sequence[int]], groups: Sequence[PrefixGroup], shape: Shape) -> None:
        """Padding rows become groups of one that share nothing."""
        rows, count, _ = shape
        padding = [(row,) for row in range(len(tables), rows)]
        members = [*(group.members for group in groups), *padding]
        starts = np.cumsum([0, *(len(m) for m in members), *[0] * (count - len(members))])
        width = max(group.blocks for group in groups)
        prefixes = np.zeros((count, width), dtype=np.int32)
        lengths = np.zeros(count, dtype=np.int32)
        for index, group in enumerate(groups):
            prefixes[index, : group.blocks] = tables[group.members[0]][: group.blocks]
            lengths[index] = group.blocks * self.block_size
        s = self._state
        s.prefix_tables[:count, :width].copy_(self._send(prefixes))
        s.prefix_lengths[:count].copy_(self._send(lengths))
        s.member_starts[: count + 1].copy_(self._send(starts.astype(np.int32)))
        s.members[:rows].copy_(self._send(np.array([i for m in members for i in m], dtype=np.int32)))

    def _shape(self, count: int, groups: Sequence[PrefixGroup]) -> Shape:
        rows = min(self.rows, _bucket_size(count))
        if not groups:
            return rows, 0, 0
        group_count = len(groups) + rows - count
        return rows, min(rows, _bucket_size(group_count)), _bucket_size(max(len(group.members) for group in groups))


def _bucket_size(count: int) -> int:
    """Round up to one of a few sizes, each with its own graph: powers of two, then multiples of 32."""
    if count <= 32:
        return 1 << (count - 1).bit_length()
    return -(-count // 32) * 32
