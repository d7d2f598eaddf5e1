"""The LM head of a model as one function, for engine and learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from toolwise.models.merged_weights import plain_layer


def logits_head(
    model: Any, fixed_rows: int | None = None, *, layer: Callable[[Module], Module] = plain_layer
) -> Callable[[Tensor], Tensor]:
    """Maps hidden states to logits, including what some model families apply after the projection.

    `fixed_rows`: project this many rows at a time, padded: the rounding of a matrix product depends on its shape.
    `layer`: what to run in place of a projection with an adapter.
    """
    config = model.get_decoder().config
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    multiplier = getattr(config, "logit_scale", None) or 1.0  # Cohere
    factor = multiplier / (getattr(config, "logits_scaling", None) or 1.0)  # Granite

    def logits(states: Tensor) -> Tensor:
        projection = layer(model.get_output_embeddings())  # on each call: an adapter may have replaced it
        out: Tensor = projection(states) if fixed_rows is None else _in_fixed_rows(projection, states, fixed_rows)
        out = out if factor == 1.0 else out * factor
        return out if cap is None else torch.tanh(out / cap) * cap

    return logits


def _in_fixed_rows(projection: Callable[[Tensor], Tensor], states: Tensor, rows: int) -> Tensor:
    parts = []
    for chunk in torch.split(states, rows):
        padded = torch.cat([chunk, chunk.new_zeros(rows - len(chunk), chunk.shape[1])])
        parts.append(projection(padded)[: len(chunk)])
    return torch.cat(parts)
