"""What stands for a prompt: the trunk's states of its last token, or their mean; each prompt through the trunk once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from toolwise.errors import ModelError
from toolwise.learner.forward import can_share_prefixes, hidden_states
from toolwise.learner.packing import pack
from toolwise.models.weight_sharing import shared_copy

Pool = Literal["last", "mean"]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt as packing wants it: the token after a prompt is what the state of its last one would predict."""

    ids: Sequence[int]
    sampled: Sequence[bool]


def prompt_row(prompt: Sequence[int], pool: Pool) -> PromptRow:
    """With one token more, which is never computed; marked are the tokens whose predecessor's state is wanted."""
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
    """[prompts, width] in fp32. Prompts are packed without padding, and what they have in common is computed once."""
    rows = [prompt_row(prompt, pool) for prompt in prompts]
    sums: Tensor | None = None
    for packed in pack(rows, max_tokens, share_prefixes=can_share_prefixes(model), device=model.device):
        states = _layer_states(model, packed, layers)[packed.source].float()
        if sums is None:
            sums = states.new_zeros(len(rows), states.shape[1])
        sums = sums.index_add(0, packed.row, states)
    if sums is None:
        return torch.zeros(0, feature_width(model, layers), device=model.device)
    counts = torch.tensor([sum(row.sampled) for row in rows], device=sums.device)
    return sums / counts[:, None]


class PromptEncoder(Protocol):
    """What generates, where it can also read: a prompt that it has read it need not compute again to go on from it."""

    async def encode(self, prompt_ids: Sequence[int], *, pool: Pool = "last") -> Tensor: ...


def engine_encoder(reader: PromptEncoder, pool: Pool) -> Callable[[Sequence[Sequence[int]]], Tensor]:
    """Features by whoever generates. Waits for them in a loop of its own, so that it can be called from anywhere."""

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
    """[T, width]: the states of all the layers asked for, side by side."""
    inner = [layer for layer in layers if layer != -1]
    if inner and not can_share_prefixes(model):
        raise ModelError(f"{type(model).__name__} is computed padded, layer by layer unseen: set router.layers to [-1]")
    if not inner:
        return hidden_states(model, packed)
    own = shared_copy(model)
    heard = _capture_layers(own.get_decoder(), inner)
    last = hidden_states(own, packed)
    return torch.cat([last if layer == -1 else heard[layer].reshape(last.shape) for layer in layers], dim=-1)


def _capture_layers(trunk: Any, layers: Sequence[int]) -> dict[int, Tensor]:
    """Will hold what layers in the middle give: 0 is the first, -2 the last but one. `trunk` is a copy that nobody
    else runs."""
    heard: dict[int, Tensor] = {}

    def listen(layer: int) -> None:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            heard[layer] = output[0] if isinstance(output, tuple) else output

        part = trunk.layers[layer]
        part._forward_hooks = part._forward_hooks.copy()  # a copy shares its hooks with the model
        part.register_forward_hook(keep)

    for layer in layers:
        listen(layer)
    return heard
