"""The weights and the kernels of one layer, from its description (`models/decoder_layers.py`).

Projections of the same input are joined without a copy: their parameters become views of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from toolwise.kernels import kernel
from toolwise.models.decoder_layers import Activation, DecoderLayer, RmsNorm, gelu_tanh

ProjectionFn = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one layer: views of the model's own parameters."""

    before_attention: torch.Tensor | None
    qkv: ProjectionFn
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norms_heads: bool
    """Whether these norms are of each head, not of all heads together."""
    rope: str | None
    attention: dict[str, Any]
    """Scale, window and soft cap, as arguments of the attention kernels."""
    out: ProjectionFn
    after_attention: torch.Tensor | None
    before_mlp: torch.Tensor | None
    gate_up: ProjectionFn
    activate: ProjectionFn
    """act(gate) · up"""
    down: ProjectionFn
    after_mlp: torch.Tensor | None
    residual_scale: float


def fused_layer(layer: DecoderLayer, device: torch.device) -> FusedLayer:
    def weight(norm: RmsNorm | None) -> torch.Tensor | None:
        return None if norm is None else norm.module.weight

    attention = layer.attention
    return FusedLayer(
        before_attention=weight(layer.before_attention),
        qkv=_fused_projection(layer.qkv),
        q_norm=weight(layer.q_norm),
        k_norm=weight(layer.k_norm),
        norms_heads=layer.q_norm is not None and len(layer.q_norm.module.weight) == attention.key_size,
        rope=layer.rope,
        attention={"scale": attention.scale, "window": attention.window, "softcap": attention.softcap},
        out=layer.out,
        after_attention=weight(layer.after_attention),
        before_mlp=weight(layer.before_mlp),
        gate_up=_fused_projection(layer.gate_up),
        activate=_gated_activation(layer.activation, device),
        down=layer.down,
        after_mlp=weight(layer.after_mlp),
        residual_scale=layer.residual_scale,
    )


def _gated_activation(activation: Activation, device: torch.device) -> ProjectionFn:
    if activation in (F.silu, gelu_tanh):
        fused: ProjectionFn = kernel("silu_mul" if activation is F.silu else "gelu_tanh_mul", device)
        return fused

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def _fused_projection(parts: Sequence[Any]) -> ProjectionFn:
    """Concatenated outputs of layers with the same input, in one matmul."""
    weight = fuse_parameters([part.weight for part in parts])
    bias = None if parts[0].bias is None else fuse_parameters([part.bias for part in parts])
    return partial(F.linear, weight=weight, bias=bias)


def common_storage(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that these are consecutive slices of, or None."""
    address = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or not tensor.is_contiguous() or _storage(tensor) != _storage(tensors[0]):
            return None
        address += tensor.numel() * tensor.element_size()
    first = tensors[0].detach()
    return first.as_strided((sum(len(t) for t in tensors), *first.shape[1:]), first.stride())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def fuse_parameters(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """One tensor over all parameters, which become views of it unless they already are."""
    fused = common_storage(parameters)
    if fused is not None:
        return fused
    # A parameter backed by an inference tensor could never be trained again.
    with torch.inference_mode(False), torch.no_grad():
        fused = torch.cat([p.data for p in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = fused[start : start + len(parameter)]
            start += len(parameter)
    return fused
