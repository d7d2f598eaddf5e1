"""The engine's fast path: a decoder forward with few kernel launches over a described decoder, such as Llama.

Weights are not duplicated. `FusedDecoder(model)` moves each layer's q, k, v weights (and gate, up) into one tensor and
makes the parameters views of it (`param.data = view`): one matmul does the work of three, while in-place optimisers,
`load_state_dict` and `save_pretrained` see the same parameters as before. Anything that gives a parameter new storage
(`model.to`) undoes the layout: compare `storage_key` and build a new decoder, which restores it. `unsupported_reason`
says why a model cannot use this path; its stock forward is used then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from toolwise.errors import PolicyError
from toolwise.kernels import kernel
from toolwise.kernels.new_tokens import NewTokens
from toolwise.models.decoder_layers import DecoderLayer, RmsNorm, UndescribedError, describe_decoder

ProjectionFn = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer index, q, k, v rows [T, H + 2·KVH, D]) -> [T, H, D]: rope, cache write and attention of one layer."""


@dataclass(frozen=True)
class PagedCache:
    """Keys and values per layer, [blocks, block size, kv heads, head dim], and the rope table [positions, D]."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class PrefixGroups:
    """Groups that share their first blocks, as arguments of `shared_prefix_decode`; the step's own block tables are the
    tails."""

    tables: torch.Tensor
    lengths: torch.Tensor
    member_starts: torch.Tensor
    members: torch.Tensor
    max_members: int


def unsupported_reason(model: Any) -> str | None:
    """Why this model needs its stock forward; None if it does not."""
    try:
        decoder = describe_decoder(model)
    except UndescribedError as problem:
        return str(problem)
    dim = decoder.layers[0].attention.key_size
    if dim < 16 or dim & (dim - 1):
        return f"its head size {dim} is not a power of two of at least 16"
    norms = [norm for layer in decoder.layers for norm in layer.norms if norm is not None] + [decoder.norm]
    if any(norm.plus_one for norm in norms) or len({norm.epsilon for norm in norms}) > 1:
        return "the kernels do not compute its norms"
    if decoder.embed_scale != 1.0:
        return "the kernels do not scale its embeddings"
    table = next(iter(decoder.ropes(torch.zeros(1, 1, dtype=torch.int64, device=_device(model))).values()), None)
    if table is not None and table[0].shape[-1] != dim:
        return "the kernels do not rotate a part of each head"
    return next((reason for layer in decoder.layers if (reason := _unsupported_layer(layer)) is not None), None)


def _unsupported_layer(layer: DecoderLayer) -> str | None:
    if layer.attention.window is not None:
        return "some of its layers use sliding-window attention"
    if layer.attention.softcap is not None:
        return "some of its layers cap their attention scores"
    if layer.activation is not F.silu:
        name = getattr(layer.activation, "__name__", type(layer.activation).__name__)
        return f"its activation is {name.lower()}, not silu"
    outer = layer.before_attention is None or layer.before_mlp is None
    if outer or layer.after_attention is not None or layer.after_mlp is not None or layer.residual_scale != 1.0:
        return "the kernels do not add its layers to the residual stream in this order"
    if layer.q_norm is not None and len(layer.q_norm.module.weight) != layer.attention.key_size:
        return "the kernels do not norm all heads together"
    return None


def storage_key(model: Any) -> tuple[int, ...]:
    """Changes when a parameter gets new storage, which makes captured graphs and a `FusedDecoder` stale."""
    return tuple(p.data_ptr() for p in model.parameters())


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def _common_storage(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
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
    fused = _common_storage(parameters)
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


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one layer: views of the model's own parameters."""

    input_norm: torch.Tensor
    qkv: ProjectionFn
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: ProjectionFn
    mlp_norm: torch.Tensor
    gate_up: ProjectionFn
    down: ProjectionFn
    rotates: bool = True
    """Whether queries and keys are rotated by their positions."""


class FusedDecoder:
    """Runs the model's layers with few kernel launches. Built once per weight layout, and cheap to rebuild."""

    def __init__(self, model: Any) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise PolicyError(f"the fused forward does not support this model: {reason}; use its stock forward")
        self.model, self.decoder = model, describe_decoder(model)
        shape = self.decoder.layers[0].attention
        self.heads, self.kv_heads, self.dim = shape.heads, shape.key_heads, shape.key_size
        self.scales = [layer.attention.scale for layer in self.decoder.layers]
        self.eps = self.decoder.norm.epsilon
        self.layers = [_fused_layer(layer) for layer in self.decoder.layers]
        device = next(model.parameters()).device
        self.rms_norm, self.add_rms_norm = kernel("rms_norm", device), kernel("add_rms_norm", device)
        self.silu_mul, self.rope_and_store = kernel("silu_mul", device), kernel("rope_and_store", device)
        self.decode: Callable[..., torch.Tensor] = kernel("paged_attention_decode", device)
        self.prefill: Callable[..., torch.Tensor] = kernel("paged_attention_prefill", device)
        self.shared_decode: Callable[..., torch.Tensor] = kernel("shared_prefix_decode", device)

    def forward(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Token ids [T] to normed hidden states [T, W]; `attend` handles the cache."""
        residual: torch.Tensor = self.decoder.trunk.embed_tokens(ids)
        hidden: torch.Tensor = self.rms_norm(residual, self.layers[0].input_norm, self.eps)
        after = [layer.input_norm for layer in self.layers[1:]] + [self.decoder.norm.weight]
        for index, (layer, next_norm) in enumerate(zip(self.layers, after, strict=True)):
            qkv = layer.qkv(hidden).view(len(ids), -1, self.dim)
            mixed = layer.out(attend(index, qkv).flatten(1))
            hidden, residual = self.add_rms_norm(mixed, residual, layer.mlp_norm, self.eps)
            active = self.silu_mul(layer.gate_up(hidden))
            hidden, residual = self.add_rms_norm(layer.down(active), residual, next_norm, self.eps)
        return hidden

    def forward_decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: PagedCache,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        prefixes: PrefixGroups | None = None,
    ) -> torch.Tensor:
        """One new token per request: ids, positions, slots, lengths [B]. Lengths include the new token; with `prefixes`
        they are those of the tails."""
        angles = self._angles(cache, positions)

        def attend(index: int, qkv: torch.Tensor) -> torch.Tensor:
            kv_cache = cache.keys[index], cache.values[index]
            q, new = qkv[:, : self.heads], self._new_tokens(index, qkv, *angles[index], slots)
            if prefixes is None:
                return self.decode(q, *kv_cache, block_tables, lengths, self.scales[index], new=new)
            shared = (prefixes.tables, prefixes.lengths, prefixes.member_starts, prefixes.members)
            return self.shared_decode(
                q, *kv_cache, *shared, prefixes.max_members, block_tables, lengths, self.scales[index], new=new
            )

        return self.forward(ids, attend)

    def forward_prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: PagedCache,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lengths: torch.Tensor,
        max_query_length: int,
    ) -> torch.Tensor:
        """Concatenated prompt chunks: ids, positions, slots [T]; see `paged_attention_prefill`."""
        angles = self._angles(cache, positions)

        def attend(index: int, qkv: torch.Tensor) -> torch.Tensor:
            q = self._rope_and_store(index, qkv, *angles[index], cache, slots)
            return self.prefill(
                q, cache.keys[index], cache.values[index], block_tables, query_starts, context_lengths,
                self.scales[index], max_query_length,
            )  # fmt: skip

        return self.forward(ids, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits

    def rope_table(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's cos and sin for every position, [positions, D], in its dtype."""
        ids = torch.arange(positions, device=_device(self.model))[None]
        cos, sin = next(iter(self.decoder.ropes(ids).values()))
        return cos[0].contiguous(), sin[0].contiguous()

    def _angles(self, cache: PagedCache, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin of each layer; layers without rope are rotated by nothing."""
        rotated = cache.cos[positions], cache.sin[positions]
        if all(layer.rotates for layer in self.layers):
            return [rotated] * len(self.layers)
        unrotated = torch.ones_like(rotated[0]), torch.zeros_like(rotated[1])
        return [rotated if layer.rotates else unrotated for layer in self.layers]

    def _split_qkv(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values_from = self.heads + self.kv_heads
        return qkv[:, : self.heads], qkv[:, self.heads : values_from], qkv[:, values_from:]

    def _rope_and_store(
        self,
        index: int,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: PagedCache,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = self._split_qkv(qkv)
        layer = self.layers[index]
        self.rope_and_store(
            q, k, v, cos, sin, cache.keys[index], cache.values[index], slots,
            q_weight=layer.q_norm, k_weight=layer.k_norm, eps=self.eps,
        )  # fmt: skip
        return q

    def _new_tokens(
        self, index: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor
    ) -> NewTokens:
        _, k, v = self._split_qkv(qkv)
        layer = self.layers[index]
        return NewTokens(k, v, cos, sin, slots, layer.q_norm, layer.k_norm, self.eps)


def _fused_layer(layer: DecoderLayer) -> FusedLayer:
    assert layer.before_attention is not None
    assert layer.before_mlp is not None

    def weight(norm: RmsNorm | None) -> torch.Tensor | None:
        return None if norm is None else norm.weight

    return FusedLayer(
        input_norm=layer.before_attention.weight,
        qkv=_fused_projection(layer.qkv),
        q_norm=weight(layer.q_norm),
        k_norm=weight(layer.k_norm),
        out=layer.out,
        mlp_norm=layer.before_mlp.weight,
        gate_up=_fused_projection(layer.gate_up),
        down=layer.down,
        rotates=layer.rope is not None,
    )


def _fused_projection(parts: Sequence[Any]) -> ProjectionFn:
    """Concatenated outputs of layers with the same input, in one matmul."""
    biased = [part.bias is not None for part in parts]
    if any(biased) != all(biased):
        raise PolicyError("the fused forward needs a bias on all of q, k and v or on none; use the stock forward")
    weight = fuse_parameters([part.weight for part in parts])
    bias = fuse_parameters([part.bias for part in parts]) if all(biased) else None
    return partial(F.linear, weight=weight, bias=bias)
