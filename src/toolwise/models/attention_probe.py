"""Runs a model on a few tokens to see how its layers attend: what they pass to the attention function, and their hidden
states when two texts in one row are continued over cached keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from toolwise.models.dense_attention import AttentionLayer, dense_attention
from toolwise.models.weight_sharing import register_attention, shared_copy

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the query sees the key: what masks are built from."""
RECORDING_NAME, CACHED_NAME = "toolwise_recording", "toolwise_probe"
LENGTHS, FIRST_CHUNK = (5, 4), 3
"""Tokens of the two texts, and how many of each are in the first chunk."""
MAX_CHECKED_POSITIONS = 1 << 20


class UnsupportedAttentionError(Exception):
    """A model that cannot run over our caches."""


def probe_text(config: Any, number: int) -> list[int]:
    """The tokens of one of the two texts."""
    return [(11 * i + 7 * number + 3) % int(config.vocab_size) for i in range(LENGTHS[number])]


def inference_copy(trunk: Any, attention: str | None = None) -> Any:
    """A copy in evaluation mode, whatever the mode of the model."""
    copied = shared_copy(trunk, attention=attention)
    for module in copied.modules():
        module.training = False
    return copied


# --- what each layer passes to the attention function

_MASKS: ContextVar[dict[int, tuple[Tensor, MaskFunction]]] = ContextVar("masks")
"""Masks built in a recorded pass, by the address of their memory: layers may get slices of them."""


def record_layers(trunk: Any, text: Sequence[int], device: Any) -> tuple[AttentionLayer, ...]:
    recording = inference_copy(trunk, _register_recording())
    longest = int(getattr(trunk.config, "max_position_embeddings", 0) or 0) or 1 << 17
    recorder = _Recorder(min(longest, MAX_CHECKED_POSITIONS))
    token = _MASKS.set({})
    try:
        _run(recording, [text], [range(len(text))], device, recorder)
    finally:
        _MASKS.reset(token)
    if not recorder.layers:
        raise UnsupportedAttentionError("its layers do not attend through transformers' attention interface")
    if recorder.indices != list(range(len(recorder.indices))):
        raise UnsupportedAttentionError("some of its layers do not attend through transformers' attention interface")
    return tuple(recorder.layers)


@dataclass
class _Recorder:
    longest: int
    layers: list[AttentionLayer] = field(default_factory=list)
    indices: list[int | None] = field(default_factory=list)
    windows: dict[int, int | None] = field(default_factory=dict)
    """Window of each mask."""

    def window(self, mask: Tensor | None) -> int | None:
        if mask is None:
            return None
        address = mask.untyped_storage().data_ptr()
        if address not in _MASKS.get():
            raise UnsupportedAttentionError("it builds its own attention masks")
        if address not in self.windows:
            self.windows[address] = _window(_MASKS.get()[address][1], self.longest)
        return self.windows[address]


def _window(function: MaskFunction, longest: int) -> int | None:
    """The window that a mask function describes, checked at several queries and all keys."""
    keys, zero = torch.arange(longest), torch.tensor(0)

    def visible(query: int) -> Tensor:
        return function(zero, zero, torch.tensor(query), keys).expand(longest)

    window = int(visible(longest - 1).sum())
    near = (0, 1, 2, window - 1, window, window + 1, longest // 3, longest // 2, longest - 2, longest - 1)
    for query in {query for query in near if 0 <= query < longest}:
        if not torch.equal(visible(query), (keys <= query) & (keys > query - window)):
            raise UnsupportedAttentionError("its attention is neither causal nor a sliding window")
    return None if window >= longest else window


def _record_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, device: Any = None, **_: Any
) -> Tensor:
    mask = torch.zeros(batch_size, 1, q_length, kv_length, device=device)
    _MASKS.get()[mask.untyped_storage().data_ptr()] = mask, mask_function
    return mask


def _record_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    toolwise_probe: _Recorder | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if toolwise_probe is None:
        raise UnsupportedAttentionError("it does not pass options on to its attention")
    if options.get("position_bias") is not None:
        raise UnsupportedAttentionError("it adds a position bias to its attention scores")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = AttentionLayer(
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        scale,
        toolwise_probe.window(attention_mask),
        softcap or None,
        s_aux is not None,
    )
    toolwise_probe.layers.append(layer)
    toolwise_probe.indices.append(getattr(module, "layer_idx", None))
    positions = torch.arange(query.shape[2], device=query.device)
    return _attend(query, key, value, positions[:, None] - positions, layer, s_aux), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, distance: Tensor, layer: AttentionLayer, sinks: Tensor | None
) -> Tensor:
    """`distance` [queries, keys]: how many tokens a key is before the query; negative for keys that it never sees."""
    hidden = distance < 0 if layer.window is None else (distance < 0) | (distance >= layer.window)
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
    out = dense_attention(
        query, key.to(query.dtype), value, mask, scale=layer.scale, softcap=layer.softcap, sinks=sinks
    )
    return out.transpose(1, 2).contiguous()


@cache
def _register_recording() -> str:
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(RECORDING_NAME, _record_mask)
    return register_attention(RECORDING_NAME, _record_attention)


# --- two texts in two chunks, over cached keys and values


@dataclass
class _CachedTexts:
    layers: tuple[AttentionLayer, ...]
    texts: Tensor
    """The text of each token so far."""
    positions: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


def run_in_chunks(
    trunk: Any, layers: tuple[AttentionLayer, ...], texts: Sequence[Sequence[int]], device: Any
) -> list[Tensor]:
    """Hidden states of each text."""
    cached = inference_copy(trunk, register_attention(CACHED_NAME, _attend_to_cached))
    none = torch.zeros(0, dtype=torch.int64, device=device)
    context = _CachedTexts(layers, none, none)
    parts: list[list[Tensor]] = [[] for _ in texts]
    for first, last in ((0, FIRST_CHUNK), (FIRST_CHUNK, max(LENGTHS))):
        chunks = [range(first, min(last, len(text))) for text in texts]
        numbers = torch.tensor([n for n, chunk in enumerate(chunks) for _ in chunk], device=device)
        positions = torch.tensor([position for chunk in chunks for position in chunk], device=device)
        context.texts, context.positions = (
            torch.cat([context.texts, numbers]),
            torch.cat([context.positions, positions]),
        )
        states = _run(cached, texts, chunks, device, context)
        for part, chunk_states in zip(parts, torch.split(states, [len(chunk) for chunk in chunks]), strict=True):
            part.append(chunk_states)
    return [torch.cat(part) for part in parts]


def _run(trunk: Any, texts: Sequence[Sequence[int]], chunks: Sequence[range], device: Any, context: Any) -> Tensor:
    """Hidden states [tokens, width] of some tokens of each text, in one row."""
    ids = [text[position] for text, chunk in zip(texts, chunks, strict=True) for position in chunk]
    positions = [position for chunk in chunks for position in chunk]
    states: Tensor = trunk(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        toolwise_probe=context,
    ).last_hidden_state[0]
    return states


def _attend_to_cached(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    toolwise_probe: _CachedTexts,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    context, index = toolwise_probe, module.layer_idx
    keys = context.keys[index] = torch.cat([context.keys[index], key], 2) if index in context.keys else key
    values = context.values[index] = torch.cat([context.values[index], value], 2) if index in context.values else value
    new = slice(len(context.texts) - query.shape[2], None)
    distance = context.positions[new, None] - context.positions
    distance = distance.masked_fill(context.texts[new, None] != context.texts, -1)
    return _attend(query, keys, values, distance, context.layers[index], s_aux), None
