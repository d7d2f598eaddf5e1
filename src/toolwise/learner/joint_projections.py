"""Projections of one input as one product, forward and backward: plain ones, and ones with merged adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolwise.kernels.fused_layer import common_storage, fuse_parameters
from toolwise.models.merged_weights import AdaptedLinear

Projection = Callable[[Tensor], Tensor]


def joint_projection(parts: Sequence[Any]) -> Projection:
    """The outputs of layers with the same input, concatenated: one product where their weights can be joined."""
    plain = all(type(part) is nn.Linear for part in parts)
    if len(parts) == 1 and (plain or not _has_frozen_weight(parts[0])):
        only: Projection = parts[0]
        return only
    if len({part.bias is None for part in parts}) > 1 or not (plain or all(map(_has_frozen_weight, parts))):
        return lambda x: torch.cat([part(x) for part in parts], -1)
    weights, biases = [part.weight for part in parts], [part.bias for part in parts if part.bias is not None]
    owned = all(weight.requires_grad for weight in weights) or all(isinstance(part, AdaptedLinear) for part in parts)
    if not owned and common_storage(weights) is None:
        # Others may have joined these weights in another way, and would move them back.
        return lambda x: torch.cat([part(x) for part in parts], -1)
    weight, bias = fuse_parameters(weights), fuse_parameters(biases) if biases else None
    if plain:
        return lambda x: JointLinear.apply(x, weight, bias, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return AdaptedProjection(parts, weight, bias)


def _has_frozen_weight(part: Any) -> bool:
    if isinstance(part, AdaptedLinear):
        return not part.transposed
    return type(part) is nn.Linear and not any(parameter.requires_grad for parameter in part.parameters())


class JointLinear(torch.autograd.Function):
    """x·Wᵀ + b for the joint weight of several layers, which get the gradients of their rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, count: int, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4:]) else None, weight)
        ctx.sizes, ctx.biased = [len(part) for part in parts[:count]], len(parts) > count
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        weights: Sequence[Tensor | None] = [None] * len(ctx.sizes)
        biases: Sequence[Tensor | None] = [None] * (len(ctx.sizes) * ctx.biased)
        if any(ctx.needs_input_grad[4:]):
            weights = torch.split(grad.t() @ x, ctx.sizes)
            biases = torch.split(grad.sum(0), ctx.sizes) if ctx.biased else ()
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None, *weights, *biases


@dataclass(frozen=True, slots=True)
class AdapterFactors:
    """The adapters of a joint projection, in the precision of its products."""

    a: Tensor
    """[R, in]: all A, one below the other."""
    b: Tensor
    """[out, R]: each B in the rows and columns of its own layer, zero elsewhere."""
    scaling: Tensor
    """[R]"""


class AdaptedProjection:
    """Layers with merged weights, some of them adapted, in one product; `refresh` after the adapters have changed."""

    def __init__(self, parts: Sequence[Any], weight: Tensor, bias: Tensor | None) -> None:
        self._parts, self._weight, self._bias = list(parts), weight, bias
        ends = list(accumulate((len(part.weight) for part in parts), initial=0))
        found = [(p, slice(*span)) for p, span in zip(parts, pairwise(ends), strict=True) if hasattr(p, "lora_a")]
        self._adapted = [part for part, _ in found]
        columns = accumulate((len(part.lora_a) for part in self._adapted), initial=0)
        self._spans = [(rows, slice(*span)) for (_, rows), span in zip(found, pairwise(columns), strict=True)]
        self._adapters = [tensor for part in self._adapted for tensor in (part.lora_a, part.lora_b)]
        self._scales: list[float] = []
        self._scaling: Tensor | None = None
        self._factors = self._read_factors()

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = JointMergedLinear.apply(  # type: ignore[no-untyped-call]
            x, self._weight, self._bias, self._factors, self._spans, *self._adapters
        )
        return out

    def refresh(self) -> bool:
        """Read the adapters again; False if the weights are no longer where they were joined."""
        joined = common_storage([part.weight for part in self._parts])
        if joined is None or joined.data_ptr() != self._weight.data_ptr():
            return False
        self._factors = self._read_factors()
        return True

    @torch.no_grad()
    def _read_factors(self) -> AdapterFactors:
        like = self._weight
        a = torch.cat([part.lora_a.detach() for part in self._adapted]).to(like)
        b = torch.zeros(len(like), len(a), dtype=like.dtype, device=like.device)
        for part, (rows, columns) in zip(self._adapted, self._spans, strict=True):
            b[rows, columns] = part.lora_b.detach()
        scales = [part.scaling for part in self._adapted for _ in range(len(part.lora_a))]
        if self._scaling is None or self._scales != scales:  # rarely changes, and sending it takes as long as the rest
            self._scales = scales
            self._scaling = torch.tensor(scales, dtype=self._adapters[0].dtype, device=like.device)
        return AdapterFactors(a, b, self._scaling)


class JointMergedLinear(torch.autograd.Function):
    """`MergedProduct` of several layers with one joint weight, which is frozen. Thin products take as long as reading
    their long factor, so all adapters share one: of x, and of ∂y, whose product with an adapter of other rows is not
    used."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factors: AdapterFactors,
        spans: list[tuple[slice, slice]],
        *adapters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factors, ctx.spans, ctx.dtypes = factors, spans, [adapter.dtype for adapter in adapters]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad, factors = grads[0], ctx.factors
        grad_a = ((grad @ factors.b).t() @ x) * factors.scaling[:, None]
        grad_b = (grad.t() @ (x @ factors.a.t())) * factors.scaling
        found = [part for rows, columns in ctx.spans for part in (grad_a[columns], grad_b[rows, columns])]
        found = [part.to(dtype) for part, dtype in zip(found, ctx.dtypes, strict=True)]
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None, None, *found
