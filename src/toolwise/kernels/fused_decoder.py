"""The engine's fast path: a forward pass with few kernel launches over any decoder of `models/decoder_layers.py`.

Weights are not duplicated. `FusedDecoder(model)` moves each layer's q, k, v weights (and gate, up) into one tensor and
makes the parameters views of it (`param.data = view`): one matmul does the work of three, while in-place optimisers,
`load_state_dict` and `save_pretrained` see the same parameters as before. Anything that gives a parameter new storage
(`model.to`) undoes the layout: compare `storage_key` and build a new decoder, which restores it. `unsupported_reason`
says why a model cannot use this path; its stock forward is used then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from toolwise.errors import PolicyError
from toolwise.kernels import MAX_HEAD_SIZE, available, kernel
from toolwise.kernels.fused_layer import FusedLayer, fused_layer
from toolwise.kernels.new_tokens import NewTokens
from toolwise.models.decoder_layers import UndescribedError, describe_decoder

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer index, q, k, v rows [T, H + 2·KVH, D]) -> [T, H, D]: rope, cache write and attention of one layer."""
Rope = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, [positions, R], of the first R elements of each head."""


@dataclass(frozen=True)
class PagedCache:
    """Keys and values per layer, [blocks, block size, kv heads, head dim], and a table of each rope by its name."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    ropes: Mapping[str, Rope]


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
    if dim > MAX_HEAD_SIZE:
        return f"its heads of {dim} are larger than {MAX_HEAD_SIZE}"
    norms = [norm for layer in decoder.layers for norm in layer.norms if norm is not None] + [decoder.norm]
    if len({(norm.epsilon, norm.plus_one) for norm in norms}) > 1:
        return "its norms are of different kinds"
    for parts in (parts for layer in decoder.layers for parts in (layer.qkv, layer.gate_up)):
        if len({part.bias is None for part in parts}) > 1:
            return "some of the projections that the kernels join have a bias, others have none"
    return None


def storage_key(model: Any) -> tuple[int, ...]:
    """Changes when a parameter gets new storage, which makes captured graphs and a `FusedDecoder` stale."""
    return tuple(p.data_ptr() for p in model.parameters())


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


class FusedDecoder:
    """Runs the model's layers with few kernel launches. Built once per weight layout, and cheap to rebuild."""

    def __init__(self, model: Any) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise PolicyError(f"the fused forward does not support this model: {reason}; use its stock forward")
        self.model, self.decoder = model, describe_decoder(model)
        shape = self.decoder.layers[0].attention
        self.heads, self.kv_heads, self.dim = shape.heads, shape.key_heads, shape.key_size
        self.norm = self.decoder.norm.module.weight
        self.eps, self.plus_one = self.decoder.norm.epsilon, self.decoder.norm.plus_one
        device = _device(model)
        self.layers = [fused_layer(layer, device) for layer in self.decoder.layers]
        options = {"eps": self.eps, "plus_one": self.plus_one}
        self.rms_norm: Callable[..., torch.Tensor] = partial(kernel("rms_norm", device), **options)
        self.add_rms_norm = partial(kernel("add_rms_norm", device), **options)
        self.rope_and_store = partial(kernel("rope_and_store", device), **options)
        self.decode: Callable[..., torch.Tensor] = kernel("paged_attention_decode", device)
        self.prefill: Callable[..., torch.Tensor] = kernel("paged_attention_prefill", device)
        self.shared_decode: Callable[..., torch.Tensor] = kernel("shared_prefix_decode", device)
        self.norm_linear: Callable[..., torch.Tensor] = kernel("norm_linear", device)
        self.linear_add = kernel("linear_add", device)
        self.is_small = all(layer.is_small for layer in self.layers)
        if self.is_small and available(device):  # the kernel before attention lets it be launched ahead
            self.decode = partial(self.decode, dependent=True)
            self.shared_decode = partial(self.shared_decode, dependent=True)

    def forward(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Token ids [T] to normed hidden states [T, W]; `attend` handles the cache."""
        residual = self._embed(ids)
        first = self.layers[0].before_attention
        hidden = residual if first is None else self.rms_norm(residual, first)
        next_norms = [layer.before_attention for layer in self.layers[1:]] + [self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            qkv = self._norm_all_heads(layer, layer.qkv(hidden)).view(len(ids), -1, self.dim)
            mixed = layer.out(attend(index, qkv).flatten(1))
            hidden, residual = self.add_rms_norm(
                mixed, residual, layer.before_mlp, after=layer.after_attention, scale=layer.residual_scale
            )
            mixed = layer.down(layer.activate(layer.gate_up(hidden)))
            hidden, residual = self.add_rms_norm(
                mixed, residual, next_norm, after=layer.after_mlp, scale=layer.residual_scale
            )
        return hidden

    def _forward_small(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """`forward` for one token per request of a small model: norms, activation and residual sums are computed by the
        kernels of the projections."""
        residual = self._embed(ids)
        hidden = self.rms_norm(residual, self.layers[0].before_attention)
        squares: torch.Tensor | None = None
        next_norms = [*(layer.before_attention for layer in self.layers[1:]), None]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            qkv = self.norm_linear(hidden, *layer.qkv, squares, self.eps).view(len(ids), -1, self.dim)
            mixed = attend(index, qkv).flatten(1)
            residual, hidden, squares = self._linear_add(mixed, layer.out, residual, layer.before_mlp)
            active = self.norm_linear(hidden, *layer.gate_up, squares, self.eps, layer.gate)
            residual, hidden, squares = self._linear_add(active, layer.down, residual, next_norm)
        return self.rms_norm(residual, self.norm)

    def _linear_add(
        self, x: torch.Tensor, projection: Any, residual: torch.Tensor, next_norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.linear_add(
            x, projection.weight, projection.bias, residual, next_norm, self.plus_one
        )
        return found

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.decoder.trunk.embed_tokens(ids)
        return embedded if self.decoder.embed_scale == 1.0 else embedded * self.decoder.embed_scale

    def _norm_all_heads(self, layer: FusedLayer, qkv: torch.Tensor) -> torch.Tensor:
        """Norm the queries and the keys of all heads together, in place (OLMo 2)."""
        if layer.q_norm is not None and layer.k_norm is not None and not layer.norms_heads:
            ends = len(layer.q_norm), len(layer.q_norm) + len(layer.k_norm)
            for rows, weight in ((qkv[:, : ends[0]], layer.q_norm), (qkv[:, ends[0] : ends[1]], layer.k_norm)):
                self.rms_norm(rows, weight, in_place=True)
        return qkv

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
            q, k, v = self._split_qkv(qkv)
            new = NewTokens(k, v, *angles[index], slots, *self._head_norms(index), self.eps, self.plus_one)
            formula = self.layers[index].attention
            if prefixes is None:
                return self.decode(q, *kv_cache, block_tables, lengths, new=new, **formula)
            shared = (prefixes.tables, prefixes.lengths, prefixes.member_starts, prefixes.members)
            return self.shared_decode(
                q, *kv_cache, *shared, prefixes.max_members, block_tables, lengths, new=new, **formula
            )

        return self._forward_small(ids, attend) if self.is_small else self.forward(ids, attend)

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
            kv_cache = cache.keys[index], cache.values[index]
            q, k, v = self._split_qkv(qkv)
            q_weight, k_weight = self._head_norms(index)
            self.rope_and_store(q, k, v, *angles[index], *kv_cache, slots, q_weight=q_weight, k_weight=k_weight)
            return self.prefill(
                q, *kv_cache, block_tables, query_starts, context_lengths, max_query_length=max_query_length,
                **self.layers[index].attention,
            )  # fmt: skip

        return self.forward(ids, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits

    def rope_tables(self, positions: int) -> dict[str, Rope]:
        """The model's cos and sin for every position, in its dtype."""
        ids = torch.arange(positions, device=_device(self.model))[None]
        return {
            name: (cos[0].contiguous(), sin[0].contiguous()) for name, (cos, sin) in self.decoder.ropes(ids).items()
        }

    def _angles(self, cache: PagedCache, positions: torch.Tensor) -> list[Rope]:
        """cos and sin of each layer; those of layers without rope are empty."""
        ropes = {name: (cos[positions], sin[positions]) for name, (cos, sin) in cache.ropes.items()}
        none = torch.empty(len(positions), 0, dtype=cache.keys[0].dtype, device=positions.device)
        return [(none, none) if layer.rope is None else ropes[layer.rope] for layer in self.layers]

    def _split_qkv(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values_from = self.heads + self.kv_heads
        return qkv[:, : self.heads], qkv[:, self.heads : values_from], qkv[:, values_from:]

    def _head_norms(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        layer = self.layers[index]
        return (layer.q_norm, layer.k_norm) if layer.norms_heads else (None, None)
