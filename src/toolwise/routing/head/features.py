"""Prompt features: the trunk's hidden state at the last token, or the mean over all; one forward pass per prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from toolwise.errors import ModelError
from toolwise.learner.forward import can_share_prefixes, hidden_states
from toolwise.learner.packing import micro_batches
from toolwise.models.weight_sharing import shared_copy

Pool = Literal["last", "mean"]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt as a row for packing, which selects the hidden states that predict the `sampled` tokens."""

    ids: Sequence[int]
    sampled: Sequence[bool]


def prompt_row(prompt: Sequence[int], pool: Pool) -> PromptRow:
    """Adds a token that is never computed, and marks each token whose predecessor's state is needed."""
    before = len(prompt) - 1 if pool == "last" else 0
    return PromptRow([*prompt, 0], [False] * (before + 1) + [True] * (len(prompt) - before))


def prompt_features(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    pool: Pool = "last",
    layers: Sequence[int] = (-1,),
    max_tokens: int = 16_384,
) -> Tensor:
    """[prompts, width] in fp32. Prompts are packed without padding; shared prefixes are computed once."""
    rows = [prompt_row(prompt, pool) for prompt in prompts]
    sums: Tensor | None = None
    for packed in micro_batches(rows, max_tokens, share_prefixes=can_share_prefixes(model), device=model.device):
        states = _layer_states(model, packed, layers)[packed.source].float()
        if sums is None:
            sums = states.new_zeros(len(rows), states.shape[1])
        sums = sums.index_add(0, packed.row, states)
    if sums is None:
        return torch.zeros(0, feature_width(model, layers), device=model.device)
    counts = torch.tensor([sum(row.sampled) for row in rows], device=sums.device)
    return sums / counts[:, None]


class PromptEncoder(Protocol):
    """An engine that can encode prompts; generating from an encoded prompt reuses its prefix."""

    async def encode(self, prompt_ids: Sequence[int], *, pool: Pool = "last") -> Tensor: ...


def engine_encoder(reader: PromptEncoder, pool: Pool) -> Callable[[Sequence[Sequence[int]]], Tensor]:
    """Prompt features from the engine. Runs its own event loop in a thread, so it can be called from anywhere."""

    async def read_all(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        return await asyncio.gather(*(reader.encode(prompt, pool=pool) for prompt in prompts))

    def encode(prompts: Sequence[Sequence[int]]) -> Tensor:
        with ThreadPoolExecutor(1, thread_name_prefix="toolwise-router") as thread:
            return torch.stack(thread.submit(asyncio.run, read_all(prompts)).result())

    return encode


def feature_width(model: Any, layers: Sequence[int] = (-1,)) -> int:
    trunk = model.get_decoder()
    width = int(trunk.get_input_embeddings().weight.shape[1])
    return int(getattr(trunk.config, "hidden_size", width)) * len(layers)


def _layer_states(model: Any, packed: Any, layers: Sequence[int]) -> Tensor:
    """[T, width]: the states of the given layers, concatenated."""
    inner = [layer for layer in layers if layer != -1]
    if inner and not can_share_prefixes(model):
        raise ModelError(f"{type(model).__name__} only gives its last hidden states: set router.layers to [-1]")
    if not inner:
        return hidden_states(model, packed)
    copy = shared_copy(model)
    outputs = _capture_layers(copy.get_decoder(), inner)
    last = hidden_states(copy, packed)
    return torch.cat([last if layer == -1 else outputs[layer].reshape(last.shape) for layer in layers], dim=-1)


def _capture_layers(trunk: Any, layers: Sequence[int]) -> dict[int, Tensor]:
    """A dict that the next forward pass fills with the outputs of inner layers (0: the first, -2: the last but one).
    `trunk` must be a copy that nothing else runs."""
    outputs: dict[int, Tensor] = {}

    def store(layer: int, module: Any, inputs: Any, output: Any) -> None:
        outputs[layer] = output[0] if isinstance(output, tuple) else output

    for layer in layers:
        block = trunk.layers[layer]
        block._forward_hooks = block._forward_hooks.copy()  # otherwise shared with the original model
        block.register_forward_hook(partial(store, layer))
    return outputs
