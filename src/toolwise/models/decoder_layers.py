"""One description of a decoder layer, read from the modules of a transformers model, for forward passes of our own.

    h = x + r · after(out(attention(rope(norm(q)), rope(norm(k)), v)))     q, k, v from before(x)
    y = h + r · after(down(act(gate) · up))                                gate, up from before(h)

Norms may be missing, projections may be fused or biased, some layers may have no rope. This covers Llama, Qwen2, Qwen3,
Mistral, SmolLM3, Gemma, Phi-3, Granite, OLMo 2 and models like them, whatever their classes are called. A model that
computes something else has parameters that the description does not read, or gives other hidden states: the engine
compares them before it uses the description (`engine/cpu_forward.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolwise.models.attention_layers import attention_layers
from toolwise.models.dense_attention import AttentionLayer

STATIC_ROPES = ("default", "linear", "llama3", "yarn", "longrope")
"""Rope types whose angles depend on the position alone, so that one table serves every request. (longrope has a second
set of angles for texts beyond its original length, which the engine does not run.)"""
Activation = Callable[[Tensor], Tensor]


class UndescribedError(Exception):
    """Why a model does not fit the description, in a few words."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """w · x / √(mean x² + ε), over the last dimension; with `plus_one`, the factor is 1 + w."""

    module: Any
    epsilon: float
    plus_one: bool = False

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.module.weight
        return 1.0 + weight.float() if self.plus_one else weight


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention: AttentionLayer
    qkv: tuple[Any, ...]
    """Projections to queries, keys and values, or one to all three."""
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    """Norms of each head, or of all heads together if they are as wide."""
    out: Any
    gate_up: tuple[Any, ...]
    """Projections to gate and up, or one to both."""
    down: Any
    activation: Activation
    before_attention: RmsNorm | None
    after_attention: RmsNorm | None
    before_mlp: RmsNorm | None
    after_mlp: RmsNorm | None
    rope: str | None
    """Name of the rope in `Decoder.ropes`; None if the layer has none."""
    residual_scale: float

    @property
    def norms(self) -> tuple[RmsNorm | None, ...]:
        return (
            self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, self.q_norm, self.k_norm
        )  # fmt: skip

    @property
    def projections(self) -> tuple[Any, ...]:
        return (*self.qkv, self.out, *self.gate_up, self.down)


@dataclass(frozen=True)
class Decoder:
    trunk: Any
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    embed_scale: float

    def ropes(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin of each rope at positions [rows, tokens], each [rows, tokens, size]."""
        rotary, weight = self.trunk.rotary_emb, self.trunk.embed_tokens.weight
        names = sorted({layer.rope for layer in self.layers if layer.rope is not None})
        by_name = isinstance(rotary.rope_type, dict)
        return {name: rotary(weight, positions, *([name] if by_name else [])) for name in names}


def longrope_limit(config: Any) -> int | None:
    """The length in tokens up to which a longrope's angles depend on the position alone; None for other ropes. Beyond
    it, every angle of a text is another one, also those of the keys that a cache holds."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings"):
            return int(rope["original_max_position_embeddings"])
    return None


def max_context(config: Any) -> int:
    """The longest text that the engine runs, in tokens."""
    longest = int(getattr(config, "max_position_embeddings", 0) or 0) or 1 << 30
    return min(longest, longrope_limit(config) or longest)


def describe_decoder(model: Any, trunk: Any = None) -> Decoder:
    """The description of the model, of the modules in `trunk` if that is a copy; raises `UndescribedError`."""
    report = attention_layers(model)
    if report.problem is not None:
        raise UndescribedError(report.problem)
    trunk = model.get_decoder() if trunk is None else trunk
    layers = _part(trunk, "layers")
    if len(layers) != len(report.layers):
        raise UndescribedError("some of its layers do not attend")
    decoder = Decoder(
        trunk,
        tuple(_describe_layer(layer, report.layers[index], trunk, index) for index, layer in enumerate(layers)),
        _norm(trunk, "norm"),
        float(getattr(trunk, "embedding_multiplier", 1.0)),
    )
    _check_parameters(trunk, (trunk.embed_tokens, trunk.norm, *layers))
    if any((layer.q_norm is None) != (layer.k_norm is None) for layer in decoder.layers):
        raise UndescribedError("it norms either queries or keys")
    if len({(a.heads, a.key_heads, a.key_size, a.value_size) for a in report.layers}) > 1:
        raise UndescribedError("its layers have heads of different shapes")
    return decoder


def _describe_layer(layer: Any, shape: AttentionLayer, trunk: Any, index: int) -> DecoderLayer:
    attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
    if shape.sinks:
        raise UndescribedError("its layers have attention sinks")
    if shape.key_size != shape.value_size:
        raise UndescribedError("its keys and values have different sizes")
    # A norm between attention and MLP belongs to the attention's output if the MLP has norms around itself.
    around_mlp = hasattr(layer, "pre_feedforward_layernorm") or hasattr(layer, "post_feedforward_layernorm")
    middle = _optional_norm(layer, "post_attention_layernorm")
    described = DecoderLayer(
        shape,
        _parts(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        _optional_norm(attention, "q_norm"),
        _optional_norm(attention, "k_norm"),
        _part(attention, "o_proj"),
        _parts(mlp, ("gate_proj", "up_proj"), "gate_up_proj"),
        _part(mlp, "down_proj"),
        _activation(mlp),
        _optional_norm(layer, "input_layernorm"),
        middle if around_mlp else None,
        _optional_norm(layer, "pre_feedforward_layernorm") if around_mlp else middle,
        _optional_norm(layer, "post_feedforward_layernorm"),
        _rope_name(trunk, attention, index),
        float(getattr(layer, "residual_multiplier", 1.0)),
    )
    if any(type(part) is not nn.Linear for part in described.projections):
        raise UndescribedError("its projections are not linear layers")
    _check_parameters(layer, (*described.projections, *(norm.module for norm in described.norms if norm is not None)))
    return described


def _rope_name(trunk: Any, attention: Any, index: int) -> str | None:
    rotary = _part(trunk, "rotary_emb")
    types = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"default": rotary.rope_type}
    for rope_type in types.values():
        if rope_type not in STATIC_ROPES:
            raise UndescribedError(f"its rope ({rope_type}) depends on the sequence length")
    if not getattr(attention, "use_rope", True):
        return None
    return trunk.config.layer_types[index] if isinstance(rotary.rope_type, dict) else "default"


def _check_parameters(module: Any, parts: Sequence[Any]) -> None:
    """Every parameter must be part of the description: one that starts as zero would not show in the results."""
    known = {id(parameter) for part in parts for parameter in part.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            raise UndescribedError(f"{type(module).__name__} has a part that the fast path does not know: {name}")


def _part(module: Any, name: str) -> Any:
    part = getattr(module, name, None)
    if part is None:
        raise UndescribedError(f"{type(module).__name__} has no {name}")
    return part


def _parts(module: Any, names: tuple[str, ...], fused: str) -> tuple[Any, ...]:
    return (getattr(module, fused),) if hasattr(module, fused) else tuple(_part(module, name) for name in names)


# --- formulas


_NORM_CLASSES: dict[type, bool | None] = {}
"""Classes whose formula is known -> `plus_one`, or None: a model is described again after each update."""


def _norm(module: Any, name: str) -> RmsNorm:
    part = _part(module, name)
    if type(part) not in _NORM_CLASSES:
        norm = rms_norm_of(part)
        _NORM_CLASSES[type(part)] = None if norm is None else norm.plus_one
    plus_one, epsilon = _NORM_CLASSES[type(part)], _epsilon(part)
    if plus_one is None or epsilon is None:
        raise UndescribedError(f"{type(module).__name__}.{name} is not an RMS norm")
    return RmsNorm(part, epsilon, plus_one)


def _epsilon(module: Any) -> float | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _optional_norm(module: Any, name: str) -> RmsNorm | None:
    return _norm(module, name) if getattr(module, name, None) is not None else None


def rms_norm_of(module: Any) -> RmsNorm | None:
    """The module as an RMS norm if it computes that formula, which is checked on a few inputs; None if it does not."""
    weight = getattr(module, "weight", None)
    epsilon = _epsilon(module)
    known = isinstance(weight, Tensor) and weight.is_floating_point() and epsilon is not None
    if not known or getattr(module, "bias", None) is not None:
        return None
    assert weight is not None
    assert epsilon is not None
    probe = _with_weight(module, torch.linspace(0.4, 1.9, weight.numel(), device=weight.device).to(weight.dtype))
    for plus_one in (False, True):
        if same_outputs(probe, partial(_apply_rms_norm, norm=RmsNorm(probe, epsilon, plus_one)), weight):
            return RmsNorm(module, epsilon, plus_one)
    return None


def _with_weight(module: Any, weight: Tensor) -> Any:
    """A copy with another weight: 2w and 1 + w are the same where a norm's weights are all one."""
    copied = copy.copy(module)
    copied._parameters = {**module._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    return copied


def _apply_rms_norm(x: Tensor, norm: RmsNorm) -> Tensor:
    if norm.plus_one:  # computed in fp32 and rounded once
        return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.epsilon).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.epsilon)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Activation | None] = {}
"""Activations by how their modules print -> a common function, or None if it is another one."""


def _activation(mlp: Any) -> Activation:
    """The activation as one torch function where it is a common one."""
    module = getattr(mlp, "act_fn", None) or _part(mlp, "activation_fn")
    name = f"{type(module).__module__}.{module!r}"
    if name not in _ACTIVATIONS:
        weight = next(iter(mlp.parameters()))
        known = (function for function in (F.silu, gelu_tanh) if same_outputs(module, function, weight))
        _ACTIVATIONS[name] = next(known, None)
    return _ACTIVATIONS[name] or module


@torch.no_grad()
def same_outputs(theirs: Any, ours: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Whether both give the same output for a few hidden states, up to rounding relative to the output's size."""
    inputs = torch.linspace(-3.0, 3.0, 2 * weight.shape[-1], device=weight.device).view(2, -1).to(weight.dtype)
    try:
        expected, actual = theirs(inputs).float(), ours(inputs).float()
    except Exception:  # model code that may expect other inputs
        return False
    if expected.shape != actual.shape:
        return False
    rounding = max(torch.finfo(dtype).eps for dtype in (weight.dtype, torch.float32))  # norms compute in fp32 at best
    return bool((expected - actual).abs().max() <= 4 * rounding * expected.abs().max())
