"""The learner's forward pass: hidden states of a packed micro-batch and log-probs of its sampled tokens.

Each token goes through the trunk once, however many rows share it. Logits are computed only for tokens that predict a
sampled one, a chunk at a time, and recomputed in the backward pass when they are large.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from toolwise.errors import ModelError
from toolwise.learner.decoder_forward import DecoderForward, decoder_forward_problem
from toolwise.learner.fused_modules import fuse
from toolwise.learner.logits import logprobs_and_entropy
from toolwise.learner.packed_attention import ATTENTION_NAME, Layout, attend
from toolwise.learner.packing import Packed
from toolwise.learner.tree_attention import shallow_parts
from toolwise.models.attention_layers import attention_layers, head_problem
from toolwise.models.decoder_layers import longrope_limit
from toolwise.models.logits import logits_head
from toolwise.models.merged_weights import trainable_layer
from toolwise.models.weight_sharing import register_attention, shared_copy

CHUNK_TOKENS, CHUNK_BYTES = 1024, 1 << 29
"""Logits are computed in chunks of at least this many tokens; on a GPU, which small chunks leave idle, of this many
bytes."""
SMALL_BYTES = 1 << 24
"""Up to this size, the logits of a micro-batch are kept for the backward pass instead of recomputed."""


def can_share_prefixes(model: Any) -> bool:
    """Whether our packed attention supports every layer of the model; if not, rows are computed padded."""
    return attention_layers(model).problem is None


def prefers_node_layout(model: Any) -> bool:
    """Whether attention reads shared prefixes in place (`tree_attention`), for which rows are best laid out by node:
    full attention, half precision, on a GPU."""
    weight = next(model.parameters())
    if not weight.is_cuda or weight.dtype.itemsize != 2:
        return False
    return any(layer.plain for layer in attention_layers(model).layers)


def hidden_states(model: Any, packed: Packed) -> Tensor:
    """[T, d]: the last hidden state of each token, ready for the LM head."""
    return TrunkForward(model)(packed)


class TrunkForward:
    """A model's decoder, prepared once for all micro-batches of an update, during which neither its modules nor its
    adapters change."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._report = attention_layers(model)
        self._fused = DecoderForward(model) if decoder_forward_problem(model) is None else None
        self._layout = _layout(model)

    @classmethod
    def prepared(cls, model: Any, last: TrunkForward | None) -> TrunkForward:
        """The one of the last update if the model still has the same modules and parameters: building another takes
        longer than a GPU takes for a layer."""
        same = last is not None and last._model is model and last._layout == _layout(model)
        if last is not None and same and last._fused is not None and decoder_forward_problem(model) is None:
            return last if last._fused.refresh() else cls(model)
        return cls(model)

    def __call__(self, packed: Packed) -> Tensor:
        """[T, d]: the last hidden state of each token, ready for the LM head."""
        if self._fused is not None and (parts := shallow_parts(packed.segments, packed.ids.device)) is not None:
            return self._fused(packed.ids, packed.positions, parts)
        trunk = self._model.get_decoder()
        limit = longrope_limit(trunk.config)
        beyond_limit = limit is not None and int(packed.positions.max()) >= limit
        if self._report.problem is not None or beyond_limit:
            return _padded(shared_copy(trunk, substitute=trainable_layer), packed, limit)
        return self._run_packed(packed)

    def _run_packed(self, packed: Packed) -> Tensor:
        copied, report = self._copied, self._report
        layout = Layout.of(packed.segments, packed.ids.device, keep_gathered=self._recomputes, windows=report.windows)
        out = copied(
            input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False, toolwise_layout=layout
        )
        if layout.calls != len(report.layers):  # the other layers used a different attention
            raise ModelError(
                f"{type(copied).__name__}: only {layout.calls} of {len(report.layers)} layers used the packed "
                "attention, so its results would be wrong: use another model"
            )
        states: Tensor = out.last_hidden_state.squeeze(0)  # the gradient of squeeze is a view, that of [0] a copy
        return states

    @cached_property
    def _copied(self) -> Any:
        """The stock modules with the packed attention, and fused parts where there are kernels for them."""
        trunk = self._model.get_decoder()
        copied = shared_copy(trunk, attention=register_attention(ATTENTION_NAME, attend), substitute=trainable_layer)
        fuse(copied, trunk)
        return copied

    @cached_property
    def _recomputes(self) -> bool:
        return _recompute_layers(self._copied)


def _layout(model: Any) -> tuple[Any, ...]:
    """Changes when a module or the memory of a parameter is another, or when another parameter is trained. Read in
    every update while a GPU waits, so it walks through the modules' own tables."""
    found: list[Any] = []
    seen: set[int] = set()
    modules = [model]
    while modules:
        module = modules.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found += (id(module), module.__dict__.get("gradient_checkpointing", False))
        for parameter in module._parameters.values():
            if parameter is not None:
                found += (id(parameter), parameter.data_ptr(), parameter.requires_grad)
        modules += [child for child in module._modules.values() if child is not None]
    return tuple(found)


def _recompute_layers(trunk: Any) -> bool:
    """Set up activation checkpointing on the copied trunk if its model has it enabled; return whether it does.

    transformers checkpoints only in training mode, which would also turn on dropout, so we set the flags ourselves. The
    backward pass recomputes the copy's layers, which use the packed attention and the fused modules.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = [module for module in trunk.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in modules:
        module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        # Only the layer's own flag, not its submodules': it controls checkpointing and nothing else.
        module.training = module.training or isinstance(module, GradientCheckpointingLayer)
    return bool(modules)


def _padded(trunk: Any, packed: Packed, limit: int | None) -> Tensor:
    """Run each segment with its path as a separate padded row, for models that packed attention does not support.

    `limit`: rows up to this length and longer ones have other rope angles, so they are run apart (longrope).
    """
    rows = [torch.cat([packed.ids[a:b] for a, b in (*s.path, (s.start, s.stop))]) for s in packed.segments]
    longer = [limit is not None and len(row) > limit for row in rows]
    if any(longer) and any(segment.path for segment in packed.segments):
        raise ModelError(
            f"rows of more than {limit} tokens cannot share prefixes, because this model's rope (longrope) has other "
            "angles for them: set actor.share_prefixes = false, or shorten the rows"
        )
    states: dict[int, Tensor] = {}
    for kind in sorted(set(longer)):
        members = [i for i, row_kind in enumerate(longer) if row_kind == kind]
        states |= zip(members, _run_padded(trunk, [rows[i] for i in members]), strict=True)
    return torch.cat([states[i][s.depth : s.depth + len(s)] for i, s in enumerate(packed.segments)])


def _run_padded(trunk: Any, rows: Sequence[Tensor]) -> Tensor:
    """[rows, longest, d]"""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    out = trunk(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    if not hasattr(out, "last_hidden_state"):
        raise ModelError(
            f"{type(trunk).__name__}.get_decoder() is not the part below the LM head, so its hidden states cannot be "
            "read: train another model"
        )
    states: Tensor = out.last_hidden_state
    return states


def token_logprobs(
    model: Any, hidden: Tensor, packed: Packed, temperature: float, *, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """[S] log-prob of each sampled token and [S] entropy of its distribution; after temperature, in fp32."""
    difference = head_problem(model)
    if difference is not None:
        raise ModelError(
            f"{type(model).__name__} changes the logits of its head in a way that the learner does not know "
            f"({difference}): train another model"
        )
    head = logits_head(model, layer=trainable_layer)

    def of_chunk(states: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(head(states), rows, targets, temperature)

    states = hidden[packed.predictors]
    vocabulary = int(model.get_decoder().config.vocab_size)
    small = len(states) * vocabulary * 4 <= SMALL_BYTES
    if chunk_tokens is None:
        bytes_per_token = vocabulary * states.element_size()
        chunk_tokens = max(CHUNK_TOKENS, CHUNK_BYTES // bytes_per_token if states.is_cuda else 0)
    chunks: list[tuple[Tensor, Tensor]] = []
    offset = 0
    for start in range(0, len(packed.predicted), chunk_tokens):
        span = slice(offset, offset + sum(packed.predicted[start : start + chunk_tokens]))
        chunk_states = states[start : start + chunk_tokens]
        rows, targets = packed.predicted_by[span] - start, packed.target[span]
        if small:
            chunks.append(of_chunk(chunk_states, rows, targets))
        else:
            chunks.append(
                checkpoint(of_chunk, chunk_states, rows, targets, use_reentrant=False, preserve_rng_state=False)
            )
        offset = span.stop
    if not chunks:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    return torch.cat([logprobs for logprobs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])
