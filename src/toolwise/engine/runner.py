"""Runs one forward pass: the tokens of a plan as one row through the stock model, over the paged cache.

`prepare` creates the tensors and `forward` runs them, so that a step of a fixed shape can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.concurrency.memory import free_memory
from toolwise.engine.length_groups import MAX_GROUP_KEY_BYTES, chunk_order, group_chunks
from toolwise.engine.paged_attention import ATTENTION_NAME, PagedContext, Scratch, attend, fits_attention_kernels
from toolwise.engine.request import Request
from toolwise.engine.scheduler import Plan
from toolwise.errors import ModelError
from toolwise.kernels.host_to_device import to_device
from toolwise.models.attention_layers import attention_layers
from toolwise.models.merged_weights import merged_copy
from toolwise.models.weight_sharing import register_attention, shared_copy

SplitChunks = Callable[[Request, int], Iterator[tuple[int, int]]]
MAX_CPU_CACHE_BYTES = 4 << 30
CPU_BATCH_TOKENS, MAX_GPU_BATCH_TOKENS = 4096, 262_144


@dataclass(slots=True)
class Inputs:
    """A batch as tensors."""

    ids: Tensor
    """[1, T]"""
    positions: Tensor
    context: PagedContext
    output_rows: Tensor
    """[R] indices of the tokens whose hidden states are needed."""


class Runner:
    """The model and its KV cache: per layer [blocks, block size, key heads, head size]."""

    def __init__(self, model: Any, block_size: int, *, fixed_rows: int | None = None) -> None:
        self.source = model
        self.refresh()
        self.block_size = block_size
        self.fixed_rows = fixed_rows
        """Pad each forward pass to this many rows: the rounding of a matrix product depends on its shape."""
        weight = self.model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
        self.attention = attention_layers(self.model).layers
        self.uses_block_tables = self.device.type == "cuda" and all(map(fits_attention_kernels, self.attention))
        """Attention reads block tables directly, so nothing needs to be gathered for it."""
        self.layers = len(self.attention)
        self.windows = tuple(layer.window for layer in self.attention)
        self.softcaps = tuple(layer.softcap for layer in self.attention)
        first = self.attention[0]
        self.heads, self.key_heads, self.head_size = first.heads, first.key_heads, first.key_size
        self._scratch = (Scratch(), Scratch())
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def refresh(self) -> None:
        """Merge the model's adapters again, and copy its modules: they change when adapters are added."""
        self.model = merged_copy(self.source)
        self.trunk = shared_copy(self.model.get_decoder(), attention=register_attention(ATTENTION_NAME, attend))

    def begin(self) -> None:
        """Called before the first step after a pause: parameters may have moved meanwhile."""

    @property
    def block_bytes(self) -> int:
        numbers = sum(layer.key_heads * (layer.key_size + layer.value_size) for layer in self.attention)
        return numbers * self.block_size * int(self.dtype.itemsize)

    def blocks_for(self, memory_mb: int | None) -> int:
        """Number of blocks that fit into `memory_mb`, by default a share of the free memory."""
        if memory_mb is not None:
            return (memory_mb << 20) // self.block_bytes
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0] * 0.5) // self.block_bytes
        return min(free_memory() // 4, MAX_CPU_CACHE_BYTES) // self.block_bytes

    def allocate(self, blocks: int) -> None:
        """Zeros, not uninitialised memory: masked values are still multiplied, and 0 * NaN is NaN."""
        sizes = [(layer.key_heads, layer.key_size) for layer in self.attention]
        self.keys = [self._zeros((blocks, self.block_size, *size)) for size in sizes]
        sizes = [(layer.key_heads, layer.value_size) for layer in self.attention]
        self.values = [self._zeros((blocks, self.block_size, *size)) for size in sizes]

    def release(self) -> None:
        self.keys, self.values = [], []

    def copy(self, copies: dict[int, int]) -> None:
        """Copy block contents (target -> source), all at once."""
        if not copies:
            return
        target = torch.tensor(list(copies), device=self.device)
        source = torch.tensor(list(copies.values()), device=self.device)
        for cached in (*self.keys, *self.values):
            cached[target] = cached[source]

    @torch.inference_mode()
    def run(self, plan: Plan, chunks: SplitChunks) -> tuple[Tensor, dict[Request, list[int]]]:
        """The needed hidden states, and the rows of each request."""
        inputs, rows = self.prepare(plan, chunks)
        if inputs is None:
            return torch.empty(0), rows
        return self.forward(inputs), rows

    def prepare(self, plan: Plan, chunks: SplitChunks) -> tuple[Inputs | None, dict[Request, list[int]]]:
        parts = [(request, *chunk) for request, count in plan.items() if count for chunk in chunks(request, count)]
        if not parts:
            return None, {}
        parts = [parts[i] for i in chunk_order([(start, length) for _, start, length in parts])]
        ids: list[int] = []
        output_rows: list[int] = []
        outputs: dict[Request, list[tuple[int, range]]] = {}
        for request, start, length in parts:
            end = start + length
            first = max(start, request.first_output_position)
            if first < end:
                offset = len(ids) - start
                outputs.setdefault(request, []).append((first, range(len(output_rows), len(output_rows) + end - first)))
                output_rows.extend(range(offset + first, offset + end))
            ids += request.tokens[start:end] if length > 1 else (request.tokens[start],)
        # Chunks of one request may be in a different order than its tokens.
        rows = {request: [row for _, indices in sorted(spans) for row in indices] for request, spans in outputs.items()}
        positions, slots = self._positions_and_slots(parts)
        padding = max(0, (self.fixed_rows or 0) - len(ids))
        inputs = Inputs(
            self._tensor(ids + [0] * padding)[None],
            self._tensor(np.concatenate([positions, np.zeros(padding, dtype=np.int64)]))[None],
            self._context(parts, self._tensor(slots)),
            self._tensor(output_rows),
        )
        return inputs, rows

    def forward(self, inputs: Inputs) -> Tensor:
        context = inputs.context
        out = self.trunk(input_ids=inputs.ids, position_ids=inputs.positions, use_cache=False, toolwise_paged=context)
        if context.calls != self.layers:
            raise ModelError(
                f"{type(self.trunk).__name__}: {context.calls} of {self.layers} layers attended to the paged cache: "
                'set rollout.engine = "transformers" for this model'
            )
        states: Tensor = out.last_hidden_state[0]
        return states[inputs.output_rows]

    def _positions_and_slots(
        self, parts: list[tuple[Request, int, int]]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Position and cache slot of each token."""
        size = self.block_size
        positions = np.concatenate([np.arange(start, start + length) for _, start, length in parts])
        if len(positions) == len(parts):
            blocks = np.array([r.lease.table[start // size] for r, start, _ in parts], dtype=np.int64)
        else:
            block_ids = [np.array(r.lease.table)[np.arange(start, start + n) // size] for r, start, n in parts]
            blocks = np.concatenate(block_ids)
        return positions, blocks * size + positions % size

    def _context(self, parts: list[tuple[Request, int, int]], slots: Tensor) -> PagedContext:
        context = PagedContext(self.keys, self.values, slots, scratch=self._scratch, windows=self.windows)
        held, lengths = [start for _, start, _ in parts], [length for _, _, length in parts]
        tables = [request.lease.table for request, _, _ in parts]
        if not self.uses_block_tables:
            context.groups = group_chunks(
                held,
                lengths,
                tables,
                self.block_size,
                queries_per_kv_head=self.heads // self.key_heads,
                dtype=self.dtype,
                max_keys=MAX_GROUP_KEY_BYTES // (self.key_heads * self.head_size * int(self.dtype.itemsize)),
                fixed_shapes=self.fixed_rows is not None,
                device=self.device,
            )
            return context
        context.block_tables = self._tensor(padded_tables(tables))
        context.query_starts = self._tensor(np.array([0, *accumulate(lengths)], dtype=np.int32))
        context.context_lengths = self._tensor(np.add(held, lengths, dtype=np.int32))
        context.max_query_length = max(lengths)
        # The kernel for decoding divides keys by the size of the batch, so that rounding would depend on the company.
        context.decoding = context.max_query_length == 1 and self.fixed_rows is None
        return context

    def _tensor(self, values: Any) -> Tensor:
        return to_device(np.array(values, dtype=np.int64) if isinstance(values, list) else values, self.device)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # The OS maps zero pages as they are touched; torch would write all of them now.
        size = int(np.prod(shape)) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(self.dtype).view(shape)


def padded_tables(tables: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """[tables, longest]: one table per row, padded with zeros."""
    lengths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), lengths.max()), dtype=np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(tables), dtype=np.int32)
    return padded


def batch_tokens(model: Any) -> int:
    """Tokens per forward pass: on a GPU as many as fit into a twentieth of its memory between two layers."""
    weight, config = model.get_input_embeddings().weight, model.get_decoder().config
    if weight.device.type != "cuda":
        return CPU_BATCH_TOKENS
    bytes_per_token = 6 * int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size) * weight.element_size()
    memory = torch.cuda.get_device_properties(weight.device).total_memory // 20
    return int(min(MAX_GPU_BATCH_TOKENS, max(CPU_BATCH_TOKENS, memory // bytes_per_token)))
