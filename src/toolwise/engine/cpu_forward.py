"""A lean forward pass of Llama, Qwen2 or Qwen3 on a CPU, one token per row.

For a small model, the overhead of the stock forward takes several times as long as the computation.
`supports_cpu_forward` tells which models are supported; all others use the stock forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, Linear
from torch.nn.functional import embedding, linear, rms_norm, silu

from toolwise.kernels.llama import unsupported_reason

AttentionFn = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, query [rows, heads, size], key, value, scale) -> [rows, heads * size]"""
Rope = tuple[Tensor, Tensor]
"""cos and sin of each row's position, [rows, 1, size]; sin carries the sign of the rotation."""


def supports_cpu_forward(model: Any) -> bool:
    """Whether `CpuForward` supports the model: fp32, rope that depends only on the position, linear projections with or
    without adapters."""
    weight = model.get_input_embeddings().weight
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and unsupported_reason(model, any_head_size=True) is None


def rope_per_step(trunk: Any, starts: np.ndarray[Any, Any], steps: int) -> list[Rope]:
    """Rope of each step, one position further per step."""
    positions = torch.from_numpy(starts + np.arange(steps)[:, None])
    cos, sin = trunk.rotary_emb(trunk.embed_tokens.weight, positions)
    sin[..., : sin.shape[-1] // 2].neg_()
    return list(zip(cos.unsqueeze(2), sin.unsqueeze(2), strict=True))


class CpuForward:
    """The current parameters of a model, collected once per call: looking them up takes time too."""

    def __init__(self, trunk: Any) -> None:
        plain = type(trunk.embed_tokens) is Embedding
        self.embed = partial(embedding, weight=trunk.embed_tokens.weight) if plain else trunk.embed_tokens
        self.norm = _norm(trunk.norm)
        self.layers = [_Layer.of(layer) for layer in trunk.layers]

    def forward(self, ids: Tensor, rope: Rope, attend: AttentionFn) -> Tensor:
        """Final hidden states [rows, width], from one token per row."""
        states = self.embed(ids)
        for number, layer in enumerate(self.layers):
            normed = _apply_norm(states, layer.before_attention)
            query, key, value = (part(normed).view(len(ids), -1, layer.size) for part in layer.projections)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = _apply_norm(query, layer.query_norm), _apply_norm(key, layer.key_norm)
            mixed = attend(number, _apply_rope(query, rope), _apply_rope(key, rope), value, layer.scale)
            states = states + layer.out(mixed)
            normed = _apply_norm(states, layer.before_mlp)
            states = states + layer.down(silu(layer.gate(normed)).mul_(layer.up(normed)))
        return _apply_norm(states, self.norm)


Norm = tuple[Tensor, float]
Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    size: int
    scale: float
    projections: tuple[Projection, ...]
    """Projections of queries, keys and values."""
    query_norm: Norm | None
    key_norm: Norm | None
    out: Projection
    before_attention: Norm
    before_mlp: Norm
    gate: Projection
    up: Projection
    down: Projection

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        headwise = hasattr(attention, "q_norm")
        return cls(
            size=attention.head_dim,
            scale=attention.scaling,
            projections=tuple(map(_projection, (attention.q_proj, attention.k_proj, attention.v_proj))),
            query_norm=_norm(attention.q_norm) if headwise else None,
            key_norm=_norm(attention.k_norm) if headwise else None,
            out=_projection(attention.o_proj),
            before_attention=_norm(layer.input_layernorm),
            before_mlp=_norm(layer.post_attention_layernorm),
            gate=_projection(mlp.gate_proj),
            up=_projection(mlp.up_proj),
            down=_projection(mlp.down_proj),
        )


def _norm(module: Any) -> Norm:
    return module.weight, module.variance_epsilon


def _projection(module: Any) -> Projection:
    """The plain matrix product, or the module itself if it does more (an adapter)."""
    return partial(linear, weight=module.weight, bias=module.bias) if type(module) is Linear else module


def _apply_norm(states: Tensor, norm: Norm) -> Tensor:
    weight, epsilon = norm
    return rms_norm(states, weight.shape, weight, epsilon)


def _apply_rope(states: Tensor, rope: Rope) -> Tensor:
    """Swap the halves; the sign that stock code applies to one of them is already in sin."""
    cos, sin = rope
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
