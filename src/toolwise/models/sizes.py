"""Checks the sizes in a config.json for plausibility and against the weights. A model is allocated from its config.json
before its weights are read, so wrong sizes could use up all memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError

WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEAD_KEYS = ("num_attention_heads", "n_head", "num_heads")
MAX_SIZES = {
    **dict.fromkeys(WIDTH_KEYS, 1 << 20),
    **dict.fromkeys(DEPTH_KEYS, 4_000),
    **dict.fromkeys(HEAD_KEYS, 1 << 16),
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 28,
    "intermediate_size": 1 << 24,
    "max_position_embeddings": 1 << 32,
}
"""Far beyond any existing model; anything larger is an error or an attack."""
FINITE_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "initializer_range")
MAX_TIED_LAYERS = 200
"""Up to this many layers may share weights; beyond it each layer must have a tensor."""
MAX_PACKED_WEIGHTS = 64
"""Weights packed into one stored number, at most: 64 one-bit weights in 64 bits."""


def check_sizes(config: Mapping[str, Any], path: Path | str, weights: Mapping[str, tuple[int, ...]] | None) -> None:
    """Raise ModelError for sizes that are invalid, inconsistent, or do not match `weights` (None: unknown)."""
    for where, part in _sub_configs(config, ""):
        for name, limit in MAX_SIZES.items():
            _check_number(part.get(name), f"{path}: {where}{name}", limit)
        for name in FINITE_KEYS:
            _check_finite(part.get(name), f"{path}: {where}{name}")
        _check_heads(part, f"{path}: {where}")
        if weights is not None:
            _check_weights(part, f"{path}: {where}", weights)


def _sub_configs(config: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config itself and those of its parts: text_config, vision_config, …"""
    yield where, config
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and where.count(".") < 4:
            yield from _sub_configs(value, f"{where}{name}.")


def _check_number(value: Any, where: str, limit: int) -> None:
    for number in value if isinstance(value, list) else [value]:  # some models have one per layer
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= limit):
            raise ModelError(f"{where} is {number!r:.40}, not a whole number from 1 to {limit}: the folder is damaged")


def _check_finite(value: Any, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and abs(value) <= sys.float_info.max):
        raise ModelError(f"{where} is {value!r:.40}, not a finite number: the folder is damaged")


def _check_heads(part: Mapping[str, Any], where: str) -> None:
    width, heads, groups = _first(part, WIDTH_KEYS), _first(part, HEAD_KEYS), _first(part, ("num_key_value_heads",))
    if width and heads and not part.get("head_dim") and width % heads:
        raise ModelError(f"{where}hidden size {width} is not divisible by {heads} heads: the folder is damaged")
    if heads and groups and heads % groups:
        raise ModelError(f"{where}{heads} heads are not divisible by {groups} key-value heads: the folder is damaged")


def _check_weights(part: Mapping[str, Any], where: str, weights: Mapping[str, tuple[int, ...]]) -> None:
    capacity = MAX_PACKED_WEIGHTS * sum(math.prod(shape) for shape in weights.values())
    width, depth = _first(part, WIDTH_KEYS) or 1, _first(part, DEPTH_KEYS) or 1
    for name in ("vocab_size", "intermediate_size"):
        size = _first(part, (name,)) or 1
        if width * size > capacity:
            raise ModelError(
                f"{where}{name} {size} times hidden size {width} is more than all the weights in the folder: "
                "the folder is damaged"
            )
    if depth > max(MAX_TIED_LAYERS, len(weights)):
        raise ModelError(f"{where}{depth} layers but only {len(weights)} tensors: the folder is damaged")


def _first(part: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((part[name] for name in names if isinstance(part.get(name), int)), None)
