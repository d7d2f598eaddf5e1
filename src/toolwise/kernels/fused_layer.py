"""The weights and the kernels of one layer, from its description (`models/decoder_layers.py`).

Projections of the same input are joined without a copy: their parameters become views of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from toolwise.kernels import kernel
from toolwise.models.decoder_layers import Activation, DecoderLayer, RmsNorm, gelu_tanh

ProjectionFn = Callable[[torch.Tensor], torch.Tensor]
MAX_SMALL_WIDTH = 1024
"""Hidden states of models whose decode steps `kernels/decode_linear.py` computes; wider ones are faster with the
products of the library."""


class Projection(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one layer: views of the model's own parameters."""

    before_attention: torch.Tensor | None
    qkv: Projection
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
    gate_up: Projection
    activate: ProjectionFn
    """act(gate) · up"""
    down: ProjectionFn
    after_mlp: torch.Tensor | None
    residual_scale: float
    gate: str | None
    """The activation as an argument of `norm_linear`; None if it has another."""

    @property
    def is_small(self) -> bool:
        """Whether the layer can run in the kernels of `decode_linear.py`, and is small enough for them to be faster."""
        plain = type(self.out) is nn.Linear and type(self.down) is nn.Linear and self.residual_scale == 1.0
        norms_before = self.before_attention is not None and self.before_mlp is not None
        norms_after = self.after_attention is not None or self.after_mlp is not None
        whole_norms = self.q_norm is not None and not self.norms_heads
        width = self.qkv.weight.shape[1]
        known = plain and norms_before and not norms_after and not whole_norms and self.gate is not None
        return known and width <= MAX_SMALL_WIDTH and _computes_fast(self.qkv.weight)


def _computes_fast(weight: torch.Tensor) -> bool:
    return not weight.is_cuda or weight.element_size() == 2


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
        gate="silu" if layer.activation is F.silu else "gelu_tanh" if layer.activation is gelu_tanh else None,
    )


def _gated_activation(activation: Activation, device: torch.device) -> ProjectionFn:
    if activation in (F.silu, gelu_tanh):
        fused: ProjectionFn = kernel("silu_mul" if activation is F.silu else "gelu_tanh_mul", device)
        return fused

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def _fused_projection(parts: Sequence[Any]) -> Projection:
    """Concatenated outputs of layers with the same input, in one matmul."""
    weight = fuse_parameters([part.weight for part in parts])
    bias = None if parts[0].bias is None else fuse_parameters([part.bias for part in parts])
    return Projection(weight, bias)


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
            if parameter.is_cuda:  # freed here, while this stream may still read it: another thread's could get it
                parameter.data.record_stream(torch.cuda.current_stream(parameter.device))
            parameter.data = fused[start : start + len(parameter)]
            start += len(parameter)
    return fused
