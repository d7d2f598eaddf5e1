"""The runner for GPUs with fused kernels for the model: fused prefill, and decoding many steps ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from toolwise.engine.cpu_forward import description_problem
from toolwise.engine.cuda_graphs import MAX_DECODE_STEPS, MultiStepDecoder, Shape
from toolwise.engine.request import Request
from toolwise.engine.runner import Inputs, Runner
from toolwise.kernels import available
from toolwise.kernels.fused_decoder import FusedDecoder, PagedCache, storage_key, unsupported_reason

log = logging.getLogger("toolwise.engine")


def fused_kernels_problem(model: Any) -> str | None:
    """Why there are no fused kernels for this model on its device, in a few words; None if there are."""
    if not available(next(model.parameters()).device):
        return "there are no Triton kernels for its device"
    return unsupported_reason(model) or description_problem(model)


def supports_fused_kernels(model: Any) -> bool:
    return fused_kernels_problem(model) is None


class CudaRunner(Runner):
    """A `Runner` on the model's parameters (or merged ones), joined for the kernels (kernels/fused_decoder.py)."""

    max_decode_steps = MAX_DECODE_STEPS

    def __init__(
        self, model: Any, block_size: int, head: Callable[[Tensor], Tensor], *, max_requests: int, max_context: int
    ) -> None:
        super().__init__(model, block_size)
        self.uses_block_tables = True
        self.head = head
        self.max_requests, self.max_context = max_requests, max_context
        self._fused: FusedDecoder | None = None
        self._layout: tuple[int, ...] = ()
        self._layout_is_current = False
        self._cache: PagedCache | None = None
        self._multi_step: MultiStepDecoder | None = None

    def begin(self) -> None:
        self._layout_is_current = False

    def refresh(self) -> None:
        super().refresh()
        self._layout_is_current = False

    def allocate(self, blocks: int) -> None:
        super().allocate(blocks)
        self._cache = self._multi_step = None

    def release(self) -> None:
        super().release()
        self._cache = self._multi_step = None

    def forward(self, inputs: Inputs) -> Tensor:
        context, (fused, cache) = inputs.context, self._ready()
        assert context.block_tables is not None
        assert context.query_starts is not None
        assert context.context_lengths is not None
        ids, positions, slots = inputs.ids[0], inputs.positions[0], context.slots
        if context.decoding:
            states = fused.forward_decode(
                ids, positions, cache, slots, context.block_tables, context.context_lengths
            )  # fmt: skip
        else:
            states = fused.forward_prefill(
                ids, positions, cache, slots, context.block_tables, context.query_starts, context.context_lengths,
                context.max_query_length,
            )  # fmt: skip
        return states[inputs.output_rows]

    supports = staticmethod(MultiStepDecoder.supports)

    def decode_multi_step(
        self, requests: Sequence[Request], steps: int, interrupted: Callable[[], bool]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probs per request, at most `steps`; blocks for them must be allocated already."""
        fused, cache = self._ready()
        if self._multi_step is None:
            columns = -(-self.max_context // self.block_size)
            self._multi_step = MultiStepDecoder(fused, cache, self.head, rows=self.max_requests, columns=columns)
        return self._multi_step.run(requests, steps, interrupted)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the multi-step graphs used since the cache was allocated."""
        return () if self._multi_step is None else tuple(self._multi_step.shapes)

    def join_weights(self) -> None:
        """Build the decoder if there is none for the parameters as they are."""
        if self._layout_is_current:
            return
        if self._fused is None or self._layout != storage_key(self.model):
            self._fused = FusedDecoder(self.model)
            self._layout = storage_key(self.model)
            self._cache = self._multi_step = None
        self._layout_is_current = True

    def _ready(self) -> tuple[FusedDecoder, PagedCache]:
        """The decoder and cache, rebuilt if parameters have moved: CUDA graphs hold addresses. Looked up once per
        `begin`, since walking through the parameters takes as long as a step."""
        self.join_weights()
        assert self._fused is not None
        if self._cache is None:
            with torch.inference_mode():
                self._cache = PagedCache(self.keys, self.values, self._fused.rope_tables(self.max_context))
        return self._fused, self._cache
