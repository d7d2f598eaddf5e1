"""The learner's forward and backward pass of a plain decoder on a GPU, in few kernel launches.

    x ← x + out(attention(rope(qkv(norm x))))
    x ← x + down(silu(gate)·up)          gate, up from norm x

A GPU computes a layer of a small model faster than a CPU launches the kernels that transformers' modules and autograd
take for it, forward and backward. Here they are fewer: projections of the same input are one product, norms come with
the residual sum, queries and keys are rotated in place. The modules keep their parameters; with adapters, each
projection is the trainable layer in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from toolwise.kernels import available, kernel
from toolwise.learner.joint_projections import AdaptedProjection, Projection, joint_projection
from toolwise.learner.row_trees import Segment
from toolwise.learner.tree_attention import (
    FlashKernel,
    Parts,
    attend_to_parts,
    attend_to_parts_backward,
    attention_parts,
)
from toolwise.models.attention_layers import state_difference
from toolwise.models.attention_probe import inference_copy
from toolwise.models.decoder_layers import (
    Decoder,
    DecoderLayer,
    UndescribedError,
    describe_decoder,
    longrope_limit,
    max_context,
)
from toolwise.models.merged_weights import is_adapter, merged_copy, trainable_layer

_PROBLEMS: Any = WeakIdKeyDictionary()
"""What keeps a model from this path, by its first parameter, which is the same object in all copies of the model."""
PROBE_TOKENS, MAX_PROBED_POSITION = 24, 1 << 17
"""Length of the texts that are compared with the stock modules, and how far into a context the second one begins."""


def decoder_forward_problem(model: Any) -> str | None:
    """Why the model's stock modules are needed, in a few words; None if they are not."""
    first = next(model.parameters())
    if not available(first.device) or first.dtype.itemsize != 2:
        return "there are no kernels for its device and precision"
    trunk = model.get_decoder()
    if any(module._forward_hooks or module._forward_pre_hooks for module in trunk.modules()):
        return "some of its modules have hooks"
    if is_adapter(trunk.get_input_embeddings()):
        return "its embeddings are adapted"
    if first not in _PROBLEMS:
        plain = merged_copy(model)
        _PROBLEMS[first] = undescribed_reason(plain) or probe_difference(plain)
    problem: str | None = _PROBLEMS[first]
    return problem


def undescribed_reason(model: Any) -> str | None:
    """What the model has that the layers here do not compute."""
    try:
        decoder = describe_decoder(model)
    except UndescribedError as problem:
        return str(problem)
    size = decoder.layers[0].attention.key_size
    norms = [norm for layer in decoder.layers for norm in layer.norms if norm is not None] + [decoder.norm]
    if size % 8 or size > 256:
        return f"flash attention does not support heads of {size} numbers"
    if any(norm.plus_one for norm in norms) or decoder.embed_scale != 1.0:
        return "its norms or embeddings are scaled"
    if longrope_limit(decoder.trunk.config) is not None:
        return "its rope depends on the length of a text"
    probe = torch.zeros(1, 1, dtype=torch.int64, device=decoder.trunk.embed_tokens.weight.device)
    if any(cos.shape[-1] != size for cos, _ in decoder.ropes(probe).values()):
        return "it rotates a part of each head"
    return next((reason for layer in decoder.layers if (reason := _unknown_part(layer)) is not None), None)


def _unknown_part(layer: DecoderLayer) -> str | None:
    attention = layer.attention
    if attention.window is not None or attention.softcap is not None:
        return "its attention has windows or soft caps"
    if layer.activation is not F.silu or layer.residual_scale != 1.0:
        return "its activation is not silu, or its residuals are scaled"
    if layer.before_attention is None or layer.before_mlp is None or layer.after_attention or layer.after_mlp:
        return "its norms are in other places"
    if layer.q_norm is not None and layer.q_norm.weight.numel() != attention.key_size:
        return "it norms all heads together"
    return None


@torch.no_grad()
def probe_difference(model: Any, attention: FlashKernel | None = None) -> str | None:
    """How the hidden states of a short text differ from those of the stock modules, near the start and the end of the
    longest context; None if they do not."""
    forward, trunk = DecoderForward(model, attention), inference_copy(model.get_decoder())
    device = trunk.embed_tokens.weight.device
    ids = torch.arange(3, 3 + 5 * PROBE_TOKENS, 5, device=device) % int(trunk.config.vocab_size)
    parts = attention_parts([Segment(0, PROBE_TOKENS)], device)
    last = min(max_context(trunk.config), MAX_PROBED_POSITION) - PROBE_TOKENS
    for start in sorted({0, max(0, last)}):
        positions = torch.arange(start, start + PROBE_TOKENS, device=device)
        with torch.autocast(device.type, enabled=False):
            expected = trunk(input_ids=ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
            difference = state_difference(forward(ids, positions, parts), expected)
        if difference is not None:
            return f"its layers compute another formula ({difference})"
    return None


@dataclass(frozen=True)
class _Layer:
    described: DecoderLayer
    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection


class DecoderForward:
    """The decoder of a model, prepared for the micro-batches of one update, during which neither its modules nor its
    adapters change; `refresh` prepares it for the next update."""

    def __init__(self, model: Any, attention: FlashKernel | None = None) -> None:
        plain = merged_copy(model)
        self.decoder: Decoder = describe_decoder(plain)
        self.attention = attention or FlashKernel()
        self.recompute = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        sources = None if plain is model else _by_plain_module(plain, model)
        self._trainable: dict[int, tuple[Any, Any]] = {}
        """By the id of an adapter: the adapter, and the layer in its place."""

        def trainable(parts: Sequence[Any]) -> list[Any]:
            if sources is None:
                return list(parts)
            found = [(sources[id(part)], trainable_layer(sources[id(part)])) for part in parts]
            self._trainable |= {id(source): (source, layer) for source, layer in found if layer is not source}
            return [layer for _, layer in found]

        self.layers = [
            _Layer(
                layer,
                joint_projection(trainable(layer.qkv)),
                joint_projection(trainable([layer.out])),
                joint_projection(trainable(layer.gate_up)),
                joint_projection(trainable([layer.down])),
            )
            for layer in self.decoder.layers
        ]

    def refresh(self) -> bool:
        """Take the adapters as they are now; False if their merged weights are elsewhere, so that it must be built
        again. The modules and the parameters of the model must be the same as before."""
        if any(trainable_layer(adapter) is not layer for adapter, layer in self._trainable.values()):
            return False
        projections = (p for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return all(p.refresh() for p in projections if isinstance(p, AdaptedProjection))

    def __call__(self, ids: Tensor, positions: Tensor, parts: Parts) -> Tensor:
        """[T, d]: the last hidden state of each of the packed tokens."""
        decoder = self.decoder
        residual: Tensor = decoder.trunk.embed_tokens(ids)
        ropes = {
            name: (cos.squeeze(0).to(residual.dtype).contiguous(), sin.squeeze(0).to(residual.dtype).contiguous())
            for name, (cos, sin) in decoder.ropes(positions[None]).items()
        }
        norms = [layer.described.before_attention for layer in self.layers[1:]] + [decoder.norm]
        first = self.layers[0].described.before_attention
        assert first is not None
        hidden: Tensor = Norm.apply(residual, first.module.weight, first.epsilon)  # type: ignore[no-untyped-call]
        for layer, next_norm in zip(self.layers, norms, strict=True):
            rope = None if layer.described.rope is None else ropes[layer.described.rope]
            run = partial(self._layer, layer, next_norm, rope, parts)
            if self.recompute and torch.is_grad_enabled():
                hidden, residual = checkpoint(run, hidden, residual, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden, residual = run(hidden, residual)
        return hidden

    def _layer(
        self,
        layer: _Layer,
        next_norm: Any,
        rope: tuple[Tensor, Tensor] | None,
        parts: Parts,
        hidden: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        described = layer.described
        shape, mlp_norm = described.attention, described.before_mlp
        assert mlp_norm is not None
        qkv = layer.qkv(hidden).view(len(hidden), -1, shape.key_size)
        if described.q_norm is not None and described.k_norm is not None:
            qkv = _norm_heads(qkv, shape.heads, shape.key_heads, described.q_norm, described.k_norm)
        mixed = RotatedAttention.apply(qkv, rope, shape.heads, shape.key_heads, (parts, shape.scale, self.attention))  # type: ignore[no-untyped-call]
        hidden, residual = AddNorm.apply(  # type: ignore[no-untyped-call]
            layer.out(mixed), residual, mlp_norm.module.weight, mlp_norm.epsilon
        )
        active = GatedSilu.apply(layer.gate_up(hidden))  # type: ignore[no-untyped-call]
        out: tuple[Tensor, Tensor] = AddNorm.apply(  # type: ignore[no-untyped-call]
            layer.down(active), residual, next_norm.module.weight, next_norm.epsilon
        )
        return out


def _by_plain_module(plain: Any, model: Any) -> dict[int, Any]:
    """The model's own module, perhaps an adapter, for the id of each module of its merged copy."""
    originals = dict(model.named_modules())
    return {id(module): originals[name] for name, module in plain.named_modules()}


def _norm_heads(qkv: Tensor, heads: int, key_heads: int, q_norm: Any, k_norm: Any) -> Tensor:
    query, key, value = torch.split(qkv, [heads, key_heads, key_heads], 1)
    query, key = (
        F.rms_norm(x, x.shape[-1:], norm.module.weight, norm.epsilon) for x, norm in ((query, q_norm), (key, k_norm))
    )
    return torch.cat([query, key, value], 1)


class Norm(torch.autograd.Function):
    """RMS norm of x [T, W]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        normed: Tensor = kernel("rms_norm", x.device)(x, weight, eps)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return *kernel("rms_norm_backward", x.device)(grads[0], x, weight, ctx.eps), None


class AddNorm(torch.autograd.Function):
    """(norm(x + residual), x + residual)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = kernel("add_rms_norm", x.device)(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        total, weight = ctx.saved_tensors
        grad_normed, grad_total = grads
        if grad_normed is None:
            return grad_total, grad_total, None, None
        grad, grad_weight = kernel("rms_norm_backward", total.device)(grad_normed, total, weight, ctx.eps, grad_total)
        return grad, grad, grad_weight, None


class GatedSilu(torch.autograd.Function):
    """silu(gate)·up of [gate, up], [T, 2F]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        out: Tensor = kernel("silu_mul", gate_up.device)(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        [gate_up] = ctx.saved_tensors
        return kernel("gated_silu_backward", gate_up.device)(gate_up, grads[0])


class RotatedAttention(torch.autograd.Function):
    """Attention of packed rows, [T, heads·size]; rotates the queries and keys of `qkv` [T, heads, size] in place, since
    nothing else reads them."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        heads: int,
        key_heads: int,
        how: tuple[Parts, float, FlashKernel],
    ) -> Tensor:
        rotated = qkv[:, : heads + key_heads]
        if rope is not None:
            kernel("rotate", qkv.device)(rotated, *rope, out=rotated)
        query, key, value = torch.split(qkv, [heads, key_heads, key_heads], 1)
        out, lse = attend_to_parts(query, key, value, *how)
        ctx.save_for_backward(qkv, out, lse, *(rope or ()))
        ctx.shape, ctx.how = (heads, key_heads), how
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        qkv, out, lse, *rope = ctx.saved_tensors
        heads, key_heads = ctx.shape
        query, key, value = torch.split(qkv, [heads, key_heads, key_heads], 1)
        grad = grads[0].contiguous().view_as(out)
        of_query, of_key, of_value = attend_to_parts_backward(grad, (query, key, value), out, lse, *ctx.how)
        grad_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        parts = torch.split(grad_qkv, [heads, key_heads, key_heads], 1)
        if rope:
            rotate = kernel("rotate", qkv.device)
            rotate(of_query, *rope, back=True, out=parts[0])
            rotate(of_key, *rope, back=True, out=parts[1])
        else:
            parts[0].copy_(of_query)
            parts[1].copy_(of_key)
        parts[2].copy_(of_value)
        return grad_qkv, None, None, None, None
