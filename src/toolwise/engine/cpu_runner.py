"""Decoding on a CPU: each request keeps its keys and values in a contiguous window from step to step.

Small models are so fast that overhead dominates. So the parameters of a described decoder are called directly, for
prompts over the paged cache, and to decode many steps at a time. Then keys and values are not gathered from blocks for
each step: a window is filled once and grows by one token per step, and the new tokens are copied to their blocks when
the steps are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.concurrency.memory import free_memory
from toolwise.engine.cpu_forward import AttentionFn, CpuForward, ropes_at, ropes_per_step
from toolwise.engine.cpu_packed import PackedProjections, packing_problem
from toolwise.engine.cpu_prefill import fits_prefill, read_tokens
from toolwise.engine.kv_windows import KVWindows, WindowBatch, bucket_width
from toolwise.engine.paged_attention import Formula, attend_in_groups
from toolwise.engine.request import Request
from toolwise.engine.runner import Inputs, Runner, SplitChunks
from toolwise.engine.scheduler import Plan
from toolwise.engine.window_draws import HasStopString, WindowDraws
from toolwise.models.decoder_layers import Decoder, UndescribedError, describe_decoder
from toolwise.models.dense_attention import dense_attention
from toolwise.models.logits import logits_head
from toolwise.models.merged_weights import plain_layer

SPARE_TOKENS = 64
"""Spare room in a new window beyond the tokens held: moving to a larger one takes time."""
MAX_WINDOW_BYTES = 2 << 30
"""Limit for all windows together; never more than a quarter of the free memory."""
MIN_BATCHED_ROWS = 8
"""With fewer rows, one call takes less time than several."""
MAX_BRIEF_PRODUCTS = 1 << 27
"""Tokens times parameters of what a caller's thread computes itself: a few milliseconds."""
DecodedSteps = tuple[list[list[int]], list[list[float]]]
"""Tokens and log-probs per request."""


class CpuRunner(Runner):
    """A `Runner` that can also decode many steps at once."""

    max_decode_steps = 32

    def __init__(self, model: Any, block_size: int, head: Callable[[Tensor], Tensor]) -> None:
        self.decoder: Decoder | None = None
        self._forward: CpuForward | None = None
        self._packed: PackedProjections | None = None
        super().__init__(model, block_size)
        self.head = head
        self._windows_by_width: dict[int, KVWindows] = {}
        plain = all(layer.window is None and layer.softcap is None and not layer.sinks for layer in self.attention)
        shapes = {(layer.key_heads, size) for layer in self.attention for size in (layer.key_size, layer.value_size)}
        self._plain_shape = shapes.pop() if plain and len(shapes) == 1 else None
        """Key heads and head size, if all layers have the same and attend to everything before."""
        self._size: int = sum(parameter.numel() for parameter in self.trunk.parameters())
        self._cache: Tensor | None = None
        """Keys and values of all layers in one tensor, whose parts are `keys` and `values`, if the shape is plain."""

    def allocate(self, blocks: int) -> None:
        if self._plain_shape is None:
            super().allocate(blocks)
        else:
            self._cache = self._zeros((2 * self.layers, blocks, self.block_size, *self._plain_shape))
            self.keys, self.values = list(self._cache[: self.layers]), list(self._cache[self.layers :])

    def copy(self, copies: dict[int, int]) -> None:
        if self._cache is None:
            super().copy(copies)
        elif len(copies) == 1:  # a slice is copied many times faster than what a list names
            [(target, source)] = copies.items()
            self._cache[:, target] = self._cache[:, source]
        elif copies:
            self._cache[:, list(copies)] = self._cache[:, list(copies.values())]

    def release(self) -> None:
        super().release()
        self._windows_by_width, self._cache = {}, None

    def begin(self) -> None:
        self._forward = None

    @property
    def _parameters(self) -> CpuForward:
        """The parameters as they were at the last change or pause."""
        assert self.decoder is not None
        if self._forward is None:
            self._forward = CpuForward(self.decoder, self._packed)
        return self._forward

    def refresh(self) -> None:
        super().refresh()
        self._forward = None
        if self._packed is not None:
            self._packed.clear()
        try:
            self.decoder = describe_decoder(self.model, self.trunk)
        except UndescribedError:  # adapters may have replaced a part that must be plain
            self.decoder = None

    def pack_weights(self) -> bool:
        """Compute with packed weights from now on, if that pays: for serving, where they seldom change."""
        if self.decoder is None or packing_problem(self._size) is not None:
            return False
        self._packed = packed = PackedProjections()
        self._forward = None
        self.head = logits_head(self.model, layer=lambda module: packed(plain_layer(module)))  # type: ignore[arg-type,return-value]
        return True

    def is_brief(self, tokens: int) -> bool:
        """Whether reading so many tokens takes no longer than handing them to another thread does on a busy machine."""
        return tokens * self._size <= MAX_BRIEF_PRODUCTS

    def supports(self, request: Request) -> bool:
        return self.decoder is not None and request.decodes and request.sampled > 0

    def has_room(self, requests: Sequence[Request]) -> bool:
        """Whether windows for all requests fit into memory."""
        token_bytes = self.block_bytes // self.block_size
        window_tokens = sum(kv_windows.width * len(kv_windows.leases) for kv_windows in self._windows_by_width.values())
        needed = sum(bucket_width(request.held + SPARE_TOKENS) for request in requests)
        if needed <= window_tokens:
            return True  # there already
        return needed * token_bytes <= min(MAX_WINDOW_BYTES, free_memory() // 4 + window_tokens * token_bytes)

    @torch.inference_mode()
    def run(self, plan: Plan, chunks: SplitChunks) -> tuple[Tensor, dict[Request, list[int]]]:
        pending = [(request, count) for request, count in plan.items() if count]
        if len(pending) != 1 or self._cache is None or self.decoder is None:
            return super().run(plan, chunks)
        [(request, count)] = pending
        start, end = request.held, request.held + count
        if not fits_prefill(start, count):
            return super().run(plan, chunks)
        first, table, tokens = max(start, request.first_output_position), request.lease.table, request.tokens[:end]
        states = read_tokens(
            self.decoder, self._parameters, self._cache, table, tokens, start, self.heads, first=min(first, end - 1)
        )
        return states, {request: list(range(end - first))} if first < end else {}

    def forward(self, inputs: Inputs) -> Tensor:
        """For a short prompt of a small model, the modules of the stock forward take longer than their computation."""
        decoder, context = self.decoder, inputs.context
        if decoder is None:
            return super().forward(inputs)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            formula = Formula(scale, self.windows[layer], self.softcaps[layer])
            cache = self.keys[layer], self.values[layer]
            return attend_in_groups(query, key, value, *cache, context, formula).flatten(1)

        states = self._parameters.forward(inputs.ids[0], ropes_at(decoder, inputs.positions), attend)
        return states[inputs.output_rows]

    @torch.inference_mode()
    def decode_multi_step(
        self,
        requests: Sequence[Request],
        steps: int,
        interrupted: Callable[[], bool],
        has_stop_string: HasStopString = lambda request, new: False,
    ) -> DecodedSteps:
        """Decode up to `steps` tokens per request, until the first one is done or has a fault, or `interrupted`."""
        batches = self._assign_windows(requests)
        batch_order = [request for batch in batches for request in batch.requests]
        steps = min(steps, *(batch.kv_windows.width - max(batch.held) for batch in batches))
        steps = min(steps, *(request.sampling.max_new_tokens - request.sampled for request in requests))
        draws = WindowDraws(batch_order, has_stop_string)
        ids = [request.tokens[-1] for request in batch_order]
        assert self.decoder is not None
        ropes = ropes_per_step(self.decoder, np.concatenate([batch.held for batch in batches]), steps)
        model = self._parameters
        for step in range(steps):
            states = model.forward(torch.tensor(ids), ropes[step], self._attend(batches, step))
            ids = draws.draw(self.head(states))
            if draws.ended or interrupted():
                break
        for batch in batches:
            self._copy_kv(batch, batch.held, [held + len(draws.tokens[0]) for held in batch.held], to_blocks=True)
        row_of = {request: row for row, request in enumerate(batch_order)}
        rows = [row_of[request] for request in requests]
        return [draws.tokens[row] for row in rows], [draws.logprobs[row] for row in rows]

    def _attend(self, batches: Sequence[WindowBatch], step: int) -> AttentionFn:
        """Attention of one step: write the new token into its window, then attend to the window."""
        queries_per_kv_head, size = self.heads // self.key_heads, self.head_size
        views = []
        for batch in batches:
            offsets = batch.write_offsets + step
            if batch.mask is not None:
                batch.mask.view(-1)[batch.mask_offsets + step] = 0.0
            visible = {window: batch.visible(step, window, queries_per_kv_head) for window in set(self.windows)}
            views.append((batch, offsets, visible))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            outs = []
            window, softcap = self.windows[layer], self.softcaps[layer]
            for batch, offsets, visible in views:
                count, (first, last, mask) = len(batch.held), visible[window]
                pair = batch.kv_windows.windows[layer], batch.kv_windows.windows[self.layers + layer]
                for kv_window, new in zip(pair, (key, value), strict=True):
                    kv_window.view(-1, size).index_copy_(0, offsets, new[batch.rows].reshape(-1, size))
                k, v = (kv_window[:count, :, first:last] for kv_window in pair)
                # Query heads that share a key head are laid out as additional queries.
                q = query[batch.rows].view(count, self.key_heads, queries_per_kv_head, size)
                if softcap is None:
                    outs.append(_attend_few(q, k, v, mask, scale))
                else:
                    outs.append(dense_attention(q, k, v, mask, scale=scale, softcap=softcap))
            return (outs[0] if len(outs) == 1 else torch.cat(outs)).view(len(query), -1)

        return attend

    def _assign_windows(self, requests: Sequence[Request]) -> list[WindowBatch]:
        """Give every request a window of a suitable width that holds all its computed tokens."""
        width_by_lease = {
            id(lease): width
            for width, kv_windows in self._windows_by_width.items()
            for lease in kv_windows.leases
            if lease
        }
        by_width: dict[int, list[Request]] = defaultdict(list)
        for request in requests:
            current = width_by_lease.get(id(request.lease), 0)
            by_width[current if current > request.held else bucket_width(request.held + SPARE_TOKENS)].append(request)
        previous, self._windows_by_width = self._windows_by_width, {}
        batches, first = [], 0
        for width, members in by_width.items():
            kv_windows = previous.get(width)
            if kv_windows is None or len(kv_windows.leases) < len(members):
                shape = (1 << (len(members) - 1).bit_length(), self.key_heads, width, self.head_size)
                kv_windows = KVWindows.of(width, [self._zeros(shape) for _ in range(2 * self.layers)])
            self._windows_by_width[width] = kv_windows
            ordered = kv_windows.assign_rows(members)
            batch = WindowBatch(
                kv_windows, ordered, slice(first, first + len(ordered)), [request.held for request in ordered]
            )
            self._copy_kv(batch, kv_windows.filled, batch.held)
            batches.append(batch)
            first += len(ordered)
        return batches

    def _copy_kv(
        self, batch: WindowBatch, starts: Sequence[int], ends: Sequence[int], *, to_blocks: bool = False
    ) -> None:
        """Copy keys and values of some tokens of each request from blocks to windows, or back."""
        spans = [(row, np.arange(*span)) for row, span in enumerate(zip(starts, ends, strict=False))]
        size, kv_windows, heads = self.block_size, batch.kv_windows, np.arange(self.key_heads)
        tables = [np.array(request.lease.table) for request in batch.requests]
        of_heads = [(row * self.key_heads + heads) * kv_windows.width + positions[:, None] for row, positions in spans]
        in_windows = torch.from_numpy(np.concatenate(of_heads).ravel())
        in_blocks = torch.from_numpy(
            np.concatenate([tables[row][positions // size] * size + positions % size for row, positions in spans])
        )
        kv_windows.filled[: len(ends)] = ends
        if not len(in_windows):
            return
        for window, cached in zip(kv_windows.windows, (*self.keys, *self.values), strict=True):
            window_rows, block_rows = window.flatten(0, 2), cached.flatten(0, 1)
            if to_blocks:
                block_rows.index_copy_(
                    0, in_blocks, window_rows.index_select(0, in_windows).view(-1, *cached.shape[2:])
                )
            else:
                window_rows.index_copy_(0, in_windows, block_rows.index_select(0, in_blocks).flatten(0, 1))


def _attend_few(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[rows, heads, queries, size] in and out. For few queries each of many rows, two batched products take about three
    quarters of the time of `scaled_dot_product_attention`, which goes through blocks of queries."""
    if len(query) < MIN_BATCHED_ROWS:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if mask is not None:
        scores += mask
    return torch.matmul(torch.softmax(scores, -1), value)
