"""A lean forward pass of a described decoder (`models/decoder_layers.py`), one token per row: of several requests when
they decode, of one when its prompt is read.

For a small model, the overhead of the stock forward takes several times as long as the computation.
`cpu_forward_problem` tells which models are supported; all others use the stock forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.functional import embedding, linear, rms_norm, silu

from toolwise.models.attention_layers import state_difference
from toolwise.models.attention_probe import inference_copy
from toolwise.models.decoder_layers import (
    Decoder,
    DecoderLayer,
    RmsNorm,
    UndescribedError,
    describe_decoder,
    max_context,
)
from toolwise.models.dense_attention import dense_attention

if TYPE_CHECKING:
    from toolwise.engine.cpu_packed import OneDnnProjections, PackedProjections

AttentionFn = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, query [rows, heads, size], key, value, scale) -> [rows, heads * size]"""
Rope = tuple[Tensor, Tensor]
"""cos and sin of each row's position, [rows, 1, size]; sin carries the sign of the rotation."""
Ropes = Mapping[str, Rope]
"""The rope of each layer that has one, by its name in the description."""
Projection = Callable[[Tensor], Tensor]
PROBE_TOKENS, MAX_PROBED_POSITION = 6, 1 << 20
_PROBLEMS: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def cpu_forward_problem(model: Any) -> str | None:
    """Why `CpuForward` does not support the model, in a few words; None if it does."""
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"the fast path of the CPU computes in float32, not {str(weight.dtype).removeprefix('torch.')}"
    return description_problem(model)


def description_problem(model: Any) -> str | None:
    """Why the model does not fit the description of a decoder; None if it does, also in the numbers that it gives."""
    try:
        decoder = describe_decoder(model)
    except UndescribedError as problem:
        return str(problem)
    trunk = decoder.trunk
    if trunk not in _PROBLEMS:
        # Some models scale their queries far into a text.
        last = min(max_context(trunk.config), MAX_PROBED_POSITION) - PROBE_TOKENS
        differences = (_difference(decoder, first) for first in sorted({0, max(0, last)}))
        difference = next((difference for difference in differences if difference is not None), None)
        _PROBLEMS[trunk] = None if difference is None else f"its layers compute another formula ({difference})"
    return _PROBLEMS[trunk]


@torch.no_grad()
def _difference(decoder: Decoder, first: int) -> str | None:
    """How the hidden states of a short text, from position `first`, differ from those of the stock forward."""
    trunk = inference_copy(decoder.trunk)
    device = trunk.embed_tokens.weight.device
    ids = torch.arange(3, 3 + 5 * PROBE_TOKENS, 5, device=device) % int(trunk.config.vocab_size)
    positions = torch.arange(PROBE_TOKENS, device=device)
    distance = positions[:, None] - positions

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        layer = decoder.layers[index].attention
        hidden = (distance < 0) | (distance >= (layer.window or PROBE_TOKENS))
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=device).masked_fill_(hidden, -torch.inf)
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        return dense_attention(query, key, value, mask, scale=scale, softcap=layer.softcap).transpose(0, 1).flatten(1)

    positions = positions[None] + first
    with torch.autocast(device.type, enabled=False):
        found = CpuForward(decoder).forward(ids, ropes_at(decoder, positions), attend)
        expected = trunk(input_ids=ids[None], position_ids=positions, use_cache=False).last_hidden_state[0]
    return state_difference(found, expected)


def _signed(cos: Tensor, sin: Tensor) -> Rope:
    """The rope of [rows, size] angles."""
    sin = sin.clone()
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def ropes_at(decoder: Decoder, positions: Tensor) -> Ropes:
    """Ropes of one token per row, at `positions` [1, rows]."""
    return {name: _signed(cos[0], sin[0]) for name, (cos, sin) in decoder.ropes(positions).items()}


def ropes_per_step(decoder: Decoder, starts: np.ndarray[Any, Any], steps: int) -> list[Ropes]:
    """Ropes of each step, one position further per step."""
    positions = torch.from_numpy(starts + np.arange(steps)[:, None])
    ropes = {name: _signed(cos, sin) for name, (cos, sin) in decoder.ropes(positions).items()}
    return [{name: (cos[step], sin[step]) for name, (cos, sin) in ropes.items()} for step in range(steps)]


class CpuForward:
    """The current parameters of a model, collected once per call: looking them up takes time too. Linear layers are
    computed as torch does, or by `products`."""

    def __init__(self, decoder: Decoder, products: PackedProjections | OneDnnProjections | None = None) -> None:
        embed = decoder.trunk.embed_tokens
        self.embed = partial(embedding, weight=embed.weight) if type(embed) is Embedding else embed
        self.embed_scale = decoder.embed_scale
        self.norm = decoder.norm.weight.to(embed.weight.dtype), decoder.norm.epsilon
        self.layers = [_Layer.of(layer, products) for layer in decoder.layers]

    def forward(
        self, ids: Tensor, ropes: Ropes, attend: AttentionFn, *, needed: Tensor | slice | None = None
    ) -> Tensor:
        """Final hidden states [rows, width], from one token per row; of the `needed` rows, if not of all. The last
        layer then has queries of these rows only, and keys and values of all."""
        states = self.embed(ids)
        if self.embed_scale != 1.0:
            states = states * self.embed_scale
        for number, layer in enumerate(self.layers):
            normed = states if layer.before_attention is None else _apply_norm(states, layer.before_attention)
            query, key, value = layer.heads(normed)
            if layer.rope is not None:
                rope = ropes[layer.rope]
                query, key = _apply_rope(query, rope), _apply_rope(key, rope)
            if needed is not None and number == len(self.layers) - 1:
                query, states = query[needed], states[needed]
            added = layer.out(attend(number, query, key, value, layer.scale))
            if layer.changes_output:
                added = layer.output(added, layer.after_attention)
            states = states + added
            added = layer.mlp(states if layer.before_mlp is None else _apply_norm(states, layer.before_mlp))
            if layer.changes_output:
                added = layer.output(added, layer.after_mlp)
            states = states + added
        return _apply_norm(states, self.norm)


Norm = tuple[Tensor, float]


@dataclass(frozen=True, slots=True)
class _Layer:
    size: int
    scale: float
    qkv: tuple[Projection, ...]
    widths: list[int]
    """Widths of queries, keys and values."""
    query_norm: Norm | None
    key_norm: Norm | None
    norms_heads: bool
    """Whether these norms are of each head, not of all heads together."""
    out: Projection
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    gate_up: tuple[Projection, ...]
    activation: Projection
    gated: Projection | None
    """gate, up and activation in one, if there is such a function."""
    down: Projection
    rope: str | None
    residual_scale: float
    changes_output: bool
    """Whether the outputs of attention and MLP are normed or scaled before they are added."""

    @classmethod
    def of(cls, layer: DecoderLayer, products: PackedProjections | OneDnnProjections | None) -> _Layer:
        shape, size = layer.attention, layer.attention.key_size
        project: Callable[[Any], Projection] = _projection if products is None else products
        gates = layer.activation is silu and len(layer.gate_up) == 2
        keys = shape.key_heads * size
        return cls(
            size=size,
            scale=shape.scale,
            qkv=tuple(map(project, layer.qkv)) if products is None else products.joint(layer.qkv),
            widths=[shape.heads * size, keys, keys],
            query_norm=_norm(layer.q_norm),
            key_norm=_norm(layer.k_norm),
            norms_heads=layer.q_norm is None or len(layer.q_norm.module.weight) == size,
            out=project(layer.out),
            before_attention=_norm(layer.before_attention),
            after_attention=_norm(layer.after_attention),
            before_mlp=_norm(layer.before_mlp),
            after_mlp=_norm(layer.after_mlp),
            gate_up=tuple(map(project, layer.gate_up)),
            activation=layer.activation,
            gated=products.gated(*layer.gate_up) if products is not None and gates else None,
            down=project(layer.down),
            rope=layer.rope,
            residual_scale=layer.residual_scale,
            changes_output=bool(layer.after_attention or layer.after_mlp or layer.residual_scale != 1.0),
        )

    def heads(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before rope, each [rows, heads, size]."""
        if len(self.qkv) == 1:
            query, key, value = torch.split(self.qkv[0](states), self.widths, -1)
        else:
            query, key, value = (part(states) for part in self.qkv)
        norms = self.query_norm, self.key_norm
        if norms[0] is not None and norms[1] is not None and not self.norms_heads:
            query, key = _apply_norm(query, norms[0]), _apply_norm(key, norms[1])
        query, key, value = (part.view(len(states), -1, self.size) for part in (query, key, value))
        if norms[0] is not None and norms[1] is not None and self.norms_heads:
            query, key = _apply_norm(query, norms[0]), _apply_norm(key, norms[1])
        return query, key, value

    def mlp(self, states: Tensor) -> Tensor:
        if self.gated is not None:
            return self.down(self.gated(states))
        if len(self.gate_up) == 1:
            gate, up = self.gate_up[0](states).chunk(2, -1)
            return self.down(self.activation(gate) * up)
        to_gate, to_up = self.gate_up
        return self.down(self.activation(to_gate(states)).mul_(to_up(states)))

    def output(self, states: Tensor, norm: Norm | None) -> Tensor:
        """What is added to the residual stream."""
        states = states if norm is None else _apply_norm(states, norm)
        return states if self.residual_scale == 1.0 else states * self.residual_scale


def _norm(norm: RmsNorm | None) -> Norm | None:
    return None if norm is None else (norm.weight.to(norm.module.weight.dtype), norm.epsilon)


def _projection(module: Any) -> Projection:
    return partial(linear, weight=module.weight, bias=module.bias)


def _apply_norm(states: Tensor, norm: Norm) -> Tensor:
    weight, epsilon = norm
    return rms_norm(states, weight.shape, weight, epsilon)


def _apply_rope(states: Tensor, rope: Rope) -> Tensor:
    """Swap the halves; the sign that stock code applies to one of them is already in sin."""
    cos, sin = rope
    size = cos.shape[-1]
    if size < states.shape[-1]:
        return torch.cat([_apply_rope(states[..., :size], rope), states[..., size:]], -1)
    return torch.addcmul(states * cos, states.roll(size // 2, -1), sin)
