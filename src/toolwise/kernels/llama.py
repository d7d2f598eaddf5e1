"""The engine's fast path: a decoder forward with few kernel launches over a stock Llama, Qwen2 or Qwen3 model.

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

SUPPORTED_MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose angles depend on the position alone, so that one table serves every request."""

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


def unsupported_reason(model: Any, *, any_head_size: bool = False) -> str | None:
    """Why this model needs its stock forward; None if it does not. The kernels need certain head sizes."""
    config = model.config
    if type(model).__name__ not in SUPPORTED_MODELS:
        return f"{type(model).__name__} is not one of {', '.join(SUPPORTED_MODELS)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some of its layers use sliding-window attention"
    if model.model.rotary_emb.rope_type not in STATIC_ROPES:
        return f"its rope ({model.model.rotary_emb.rope_type}) depends on the sequence length"
    dim = model.model.layers[0].self_attn.head_dim
    if not any_head_size and (dim < 16 or dim & (dim - 1)):
        return f"its head size {dim} is not a power of two of at least 16"
    for layer in model.model.layers:
        parts = (*_attention_inputs(layer), layer.self_attn.o_proj, *_mlp_inputs(layer), layer.mlp.down_proj)
        # peft's adapters have the plain layer as `base_layer`.
        if any(type(getattr(part, "base_layer", part)) is not nn.Linear for part in parts):
            return "its projections are not linear layers (with or without LoRA)"
    return None


def _attention_inputs(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


def _mlp_inputs(layer: Any) -> tuple[Any, ...]:
    return layer.mlp.gate_proj, layer.mlp.up_proj


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


def _fuse_parameters(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
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


class FusedDecoder:
    """Runs the model's layers with few kernel launches. Built once per weight layout, and cheap to rebuild."""

    def __init__(self, model: Any) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise PolicyError(f"the fused forward does not support this model: {reason}; use its stock forward")
        config = model.config
        attention = model.model.layers[0].self_attn
        self.model = model
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.scale, self.eps = attention.head_dim, attention.scaling, config.rms_norm_eps
        self.layers = [_fused_layer(layer) for layer in model.model.layers]
        device = next(model.parameters()).device
        self.rms_norm, self.add_rms_norm = kernel("rms_norm", device), kernel("add_rms_norm", device)
        self.silu_mul, self.rope_and_store = kernel("silu_mul", device), kernel("rope_and_store", device)
        self.decode: Callable[..., torch.Tensor] = kernel("paged_attention_decode", device)
        self.prefill: Callable[..., torch.Tensor] = kernel("paged_attention_prefill", device)
        self.shared_decode: Callable[..., torch.Tensor] = kernel("shared_prefix_decode", device)

    def storage_key(self) -> tuple[int, ...]:
        """Changes when a parameter gets new storage, which makes captured graphs and this object stale."""
        return tuple(p.data_ptr() for p in self.model.parameters())

    def forward(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Token ids [T] to normed hidden states [T, W]; `attend` handles the cache."""
        residual: torch.Tensor = self.model.model.embed_tokens(ids)
        hidden: torch.Tensor = self.rms_norm(residual, self.layers[0].input_norm, self.eps)
        after = [layer.input_norm for layer in self.layers[1:]] + [self.model.model.norm.weight]
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
        cos, sin = cache.cos[positions], cache.sin[positions]

        def attend(index: int, qkv: torch.Tensor) -> torch.Tensor:
            kv_cache = cache.keys[index], cache.values[index]
            q, new = qkv[:, : self.heads], self._new_tokens(index, qkv, cos, sin, slots)
            if prefixes is None:
                return self.decode(q, *kv_cache, block_tables, lengths, self.scale, new=new)
            shared = (prefixes.tables, prefixes.lengths, prefixes.member_starts, prefixes.members)
            return self.shared_decode(
                q, *kv_cache, *shared, prefixes.max_members, block_tables, lengths, self.scale, new=new
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
        cos, sin = cache.cos[positions], cache.sin[positions]

        def attend(index: int, qkv: torch.Tensor) -> torch.Tensor:
            q = self._rope_and_store(index, qkv, cos, sin, cache, slots)
            return self.prefill(
                q, cache.keys[index], cache.values[index], block_tables, query_starts, context_lengths, self.scale,
                max_query_length,
            )  # fmt: skip

        return self.forward(ids, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits

    def rope_table(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's cos and sin for every position, [positions, D], in its dtype."""
        weight = self.model.model.embed_tokens.weight
        ids = torch.arange(positions, device=weight.device)[None]
        cos, sin = self.model.model.rotary_emb(weight, ids)
        return cos[0].contiguous(), sin[0].contiguous()

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


def _fused_layer(layer: Any) -> FusedLayer:
    attention = layer.self_attn
    return FusedLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_fused_projection(_attention_inputs(layer)),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_fused_projection(_mlp_inputs(layer)),
        down=layer.mlp.down_proj,
    )


def _fused_projection(parts: Sequence[Any]) -> ProjectionFn:
    """Concatenated outputs of layers with the same input: in one matmul, or one by one if they have adapters."""
    if any(type(part) is not nn.Linear for part in parts):
        return lambda x: torch.cat([part(x) for part in parts], dim=-1)
    biased = [part.bias is not None for part in parts]
    if any(biased) != all(biased):
        raise PolicyError("the fused forward needs a bias on all of q, k and v or on none; use the stock forward")
    weight = _fuse_parameters([part.weight for part in parts])
    bias = _fuse_parameters([part.bias for part in parts]) if all(biased) else None
    return partial(F.linear, weight=weight, bias=bias)
