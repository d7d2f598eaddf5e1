"""Which of the engine's ways a model takes, and why not a faster one.

| `toolwise-fast`    | our own forward pass: fused kernels on a GPU, a lean forward for decoding on a CPU |
| `toolwise-general` | the model's stock forward over the paged cache                                       |
| `transformers`     | the model's stock forward and transformers' own cache (`policies/transformers_generation.py`) |
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from toolwise.engine.cpu_forward import cpu_forward_problem
from toolwise.engine.cuda_runner import fused_kernels_problem
from toolwise.models.attention_layers import attention_layers, head_problem
from toolwise.models.merged_weights import merged_copy

log = logging.getLogger(__name__)

FAST, GENERAL, TRANSFORMERS = "toolwise-fast", "toolwise-general", "transformers"


def engine_path(model: Any) -> tuple[str, str]:
    """The path's name and the reason: what keeps the model from a faster path, or what makes the fast one fit."""
    model = merged_copy(model)
    problem = attention_layers(model).problem
    if problem is None and (difference := head_problem(model)) is not None:
        problem = f"its forward pass changes the logits of its head ({difference})"
    if problem is not None:
        return TRANSFORMERS, problem
    on_gpu = next(model.parameters()).device.type == "cuda"
    problem = fused_kernels_problem(model) if on_gpu else cpu_forward_problem(model)
    if problem is not None:
        return GENERAL, problem
    return FAST, "fused kernels compute its layers" if on_gpu else "the lean forward computes its layers"


@cache
def log_general_path(model: str, reason: str) -> None:
    log.info("%s uses its stock forward over the paged cache, not the fast path: %s", model, reason)
