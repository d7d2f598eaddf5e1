"""The forward pass of the learner: a packed micro-batch through the model, and log-probs of its sampled tokens.

Each token goes through the trunk once, whoever shares it. Logits exist for tokens that predict a sampled one, a chunk
at a time, and are computed again in the backward pass where they are large.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from toolwise.errors import ModelError
from toolwise.learner.fused_modules import fuse
from toolwise.learner.logits import logits_head, logprobs_and_entropy
from toolwise.learner.packed_attention import Layout, implementation
from toolwise.learner.packing import Packed
from toolwise.models.weight_sharing import shared_copy

CHUNK_TOKENS, CHUNK_BYTES = 1024, 1 << 29
"""Whose logits exist at a time: at least so many tokens, and on a GPU, where few keep it waiting, so many bytes."""
SMALL_BYTES = 1 << 24
"""Of all logits of a micro-batch: so few are kept for the backward pass, since making them again takes time."""
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def can_share_prefixes(model: Any) -> bool:
    """Whether each of its layers is a causal attention that we can compute; where not, rows are computed padded."""
    trunk = model.get_decoder()
    plain = set(getattr(trunk.config, "layer_types", None) or ()) <= KNOWN_LAYERS
    sinks = any(hasattr(module, "sinks") for module in trunk.modules())
    return plain and not sinks and bool(getattr(trunk, "_supports_attention_backend", False))


def prefers_node_layout(model: Any) -> bool:
    """Whether its attention reads what rows share where it stands (branches.py), so that they are best laid out for
    that: full layers, in half precision, on a GPU."""
    config, weight = model.get_decoder().config, next(model.parameters())
    full = "full_attention" in (getattr(config, "layer_types", None) or ("full_attention",))
    plain = not getattr(config, "attn_logit_softcapping", None)
    return bool(full and plain and weight.is_cuda and weight.dtype.itemsize == 2 and can_share_prefixes(model))


def hidden_states(model: Any, packed: Packed) -> Tensor:
    """[T, d]: what the trunk of a causal language model makes of each token, ready for its head."""
    trunk = model.get_decoder()
    if not can_share_prefixes(model):
        return _padded(trunk, packed)
    own = shared_copy(trunk, attention=implementation())
    fuse(own, trunk)
    layout = Layout.of(packed.segments, packed.ids.device, keep_gathered=_recompute_layers(own))
    out = own(input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False, toolwise_layout=layout)
    if layout.calls != trunk.config.num_hidden_layers:  # whatever the others attended to, it was not this
        raise ModelError(
            f"{type(trunk).__name__}: {layout.calls} of {trunk.config.num_hidden_layers} layers attended to packed "
            "rows as laid out, so that nothing it says can be trusted: use another model"
        )
    states: Tensor = out.last_hidden_state.squeeze(0)  # whose gradient is a view, that of [0] a copy
    return states


def _recompute_layers(own: Any) -> bool:
    """Activation checkpointing on a copy of a trunk whose model has it enabled; gives whether it has.

    It must not wait for training mode, as it does in transformers: dropout would come with it. The layer that is run
    again in the backward pass is the copy's, and so attends by layout and is fused again.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = [module for module in own.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in modules:
        module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        # The flag of the layer itself, not of what is in it: it decides this and nothing else.
        module.training = module.training or isinstance(module, GradientCheckpointingLayer)
    return bool(modules)


def _padded(trunk: Any, packed: Packed) -> Tensor:
    """Each segment after its path, in a row of its own: for models that attend in ways we cannot lay out."""
    device = packed.ids.device
    rows = [torch.cat([packed.ids[a:b] for a, b in (*s.path, (s.start, s.stop))]) for s in packed.segments]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    out = trunk(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
    return torch.cat([out[i, s.depth : s.depth + len(s)] for i, s in enumerate(packed.segments)])


def token_logprobs(
    model: Any, hidden: Tensor, packed: Packed, temperature: float, *, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """[S] log-prob of each sampled token, and the entropy of what it was drawn from; after temperature, in fp32."""
    head = logits_head(model)

    def of_chunk(states: Tensor, of: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(head(states), of, targets, temperature)

    states = hidden[packed.predictors]
    vocabulary = int(model.get_decoder().config.vocab_size)
    small = len(states) * vocabulary * 4 <= SMALL_BYTES
    if chunk_tokens is None:
        bytes_a_token = vocabulary * states.element_size()
        chunk_tokens = max(CHUNK_TOKENS, CHUNK_BYTES // bytes_a_token if states.is_cuda else 0)
    found: list[tuple[Tensor, Tensor]] = []
    done = 0
    for start in range(0, len(packed.predicted), chunk_tokens):
        here = slice(done, done + sum(packed.predicted[start : start + chunk_tokens]))
        few = states[start : start + chunk_tokens]
        of, targets = packed.predicted_by[here] - start, packed.target[here]
        if small:
            found.append(of_chunk(few, of, targets))
        else:
            found.append(checkpoint(of_chunk, few, of, targets, use_reentrant=False, preserve_rng_state=False))
        done = here.stop
    if not found:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    return torch.cat([logprobs for logprobs, _ in found]), torch.cat([entropy for _, entropy in found])
