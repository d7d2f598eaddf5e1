"""LoRA adapters as plain layers: W + s·B·A of each adapted layer, kept beside W and computed again when B or A change.

Engine, learner, vLLM and saved models all run these weights, so that none differs from the others by more than it would
without adapters, and each is as fast. In half precision the sum has to be rounded. The base weight is a representable
number, so rounding to the nearest one would return it until the adapters have grown: all of an update of |B| = 1e-6
would be lost, and 95 % of 1e-5. Instead each number rounds up from a random threshold that stays the same for the
whole run: a sum that is a tenth of the way to the next number becomes that number in a tenth of the places.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import linear
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from toolwise.models.weight_sharing import shared_copy

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of an fp32 mantissa that each precision does not have."""


def is_adapter(module: Any) -> bool:
    """Whether the module is one of peft's, around the layer `base_layer`."""
    return hasattr(type(module), "get_delta_weight") and hasattr(module, "base_layer")


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter of this name is an adapter's own."""
    return ".lora_" in name


def merged_copy(model: Any) -> Any:
    """The model with its adapters merged: a copy of its modules with plain layers in place of adapted ones. The merged
    weights are shared by all copies. A model without adapters is returned as it is."""
    return shared_copy(model, substitute=plain_layer) if any(map(is_adapter, model.modules())) else model


def plain_layer(module: Module) -> Module:
    """The layer with the current merged weight in place of an adapter; any other module as it is."""
    return _merged(module).plain if is_adapter(module) else module


def trainable_layer(module: Module) -> Module:
    """A layer that computes with the merged weight and gives the adapter its gradients; any other module as it is."""
    if not is_adapter(module):
        return module
    return _IN_PASSES[module] if module in _IN_PASSES else _merged(module).trainable or module


def base_layer(module: Module) -> Module:
    """The layer without its adapter; any other module as it is."""
    layer: Module = module.get_base_layer() if is_adapter(module) else module  # type: ignore[operator]
    return layer


@dataclass(slots=True)
class _Merged:
    """The layers in place of one adapter."""

    plain: Any
    trainable: AdaptedLinear | None
    """None if only peft's own module computes the gradients."""
    seed: int
    """Of the rounding thresholds."""
    parameters: tuple[Tensor, ...]
    """The adapter's own: A and B. (Not the base weight, which could then never be freed.)"""
    base: ReferenceType[Tensor]
    version: int = -1
    """How often these and the base weight had been written to when they were merged."""
    numbers: tuple[Tensor, ...] = ()
    """The values of A and B that were merged: held, so that others (`p.data = …`) cannot get their address."""
    base_address: int = 0


_BY_WEIGHT: Any = WeakIdKeyDictionary()
"""By the base weight, which is the same object in all copies that share it."""
_BY_ADAPTER: WeakKeyDictionary[Module, _Merged] = WeakKeyDictionary()
_ADAPTER_PARAMETERS: Any = WeakIdKeyDictionary()
_IN_PASSES: WeakKeyDictionary[Module, PassLinear] = WeakKeyDictionary()


def merge_in_passes(model: Any) -> None:
    """From now on add up the weights of the model's adapted layers in each pass, and keep none: whole base weights are
    there only during a pass. They must be whole now."""
    for module in model.modules():
        if is_adapter(module) and AdaptedLinear.supports(module):
            _IN_PASSES[module] = PassLinear(module, _seed(module.base_layer.weight))
            _BY_ADAPTER.pop(module, None)


def _merged(adapter: Any) -> _Merged:
    """What is known of the adapter, written again if the base weight, A or B have changed or been replaced. Writing to
    `p.data` in place leaves no trace."""
    merged, weight = _BY_ADAPTER.get(adapter), adapter.base_layer.weight
    parameters = _own_parameters(adapter)
    if merged is None or merged.base() is not weight or not _same(merged.parameters, parameters):
        merged = _BY_ADAPTER[adapter] = _find_or_build(adapter, parameters, merged)
    target = merged.plain.weight
    version = sum(tensor._version for tensor in (weight, *parameters) if not tensor.is_inference())
    addresses = [tensor.data_ptr() for tensor in (weight, *parameters)]
    merged_from = [merged.base_address, *(tensor.data_ptr() for tensor in merged.numbers)]
    moved = target.device != weight.device or target.dtype != weight.dtype
    if merged.version != version or moved or addresses != merged_from:
        _write(target, adapter, merged.seed)
        merged.version, merged.base_address = version, weight.data_ptr()
        merged.numbers = tuple(parameter.detach() for parameter in parameters)
    return merged


def _own_parameters(adapter: Any) -> tuple[Tensor, ...]:
    """Asked for at every layer of every forward pass: `Module.parameters` takes several times as long."""
    found: list[Tensor] = []
    modules = [adapter]
    while modules:
        module = modules.pop()
        found += [parameter for parameter in module._parameters.values() if parameter is not None]
        modules += [child for name, child in module._modules.items() if child is not None and name != "base_layer"]
    return tuple(found)


def _same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return list(map(id, left)) == list(map(id, right))


def _in_use(merged: _Merged) -> bool:
    """Whether an adapter still has the parameters that were merged."""
    return any(
        known is merged and _same(_own_parameters(adapter), merged.parameters) for adapter, known in _BY_ADAPTER.items()
    )


@torch.inference_mode(False)  # gradients flow through products with these weights
def _find_or_build(adapter: Any, parameters: tuple[Tensor, ...], before: _Merged | None) -> _Merged:
    base = adapter.base_layer
    known: _Merged | None = _BY_WEIGHT.get(base.weight)
    if known is not None and _same(known.parameters, parameters):
        return known
    if before is not None and not _in_use(before):
        plain = before.plain  # captured graphs hold its address
        plain._parameters.update({**base._parameters, "weight": plain.weight})
    else:
        plain = copy.copy(base)
        weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        plain._parameters = {**base._parameters, "weight": weight}
    trainable = AdaptedLinear(plain, adapter) if AdaptedLinear.supports(adapter) else None
    built = _Merged(plain, trainable, _seed(base.weight), parameters, ref(base.weight))
    _BY_WEIGHT[base.weight] = built
    for parameter in parameters:
        _ADAPTER_PARAMETERS[parameter] = True
    _watch_optimizers()
    return built


@cache
def _watch_optimizers() -> None:
    """torch's fused optimisers do not count as writing to the parameters that they step."""

    def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        torch.autograd.graph.increment_version([p for p in parameters if p in _ADAPTER_PARAMETERS])

    register_optimizer_step_post_hook(count)


def _seed(weight: Tensor) -> int:
    """The same in every process that loads these weights."""
    return zlib.crc32(weight.detach().flatten()[:64].float().cpu().numpy().tobytes())


@torch.inference_mode(False)
@torch.no_grad()
def _write(target: Any, adapter: Any, seed: int) -> None:
    """Write the sum in place: captured graphs hold the address."""
    weight = adapter.base_layer.weight
    if target.device != weight.device or target.dtype != weight.dtype:
        target.data = torch.empty_like(weight)  # the model has moved
    deltas = [adapter.get_delta_weight(name) for name in adapter.active_adapters]
    target.copy_(_sum(weight, deltas, seed))


def _sum(weight: Tensor, deltas: Sequence[Tensor], seed: int) -> Tensor:
    """Values that the precision of the weight can represent."""
    total = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for delta in deltas:
        total = total + delta.to(total.dtype)
    return rounded(total, weight.dtype, seed)


def rounded(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """fp32 values that `dtype` can represent: up or down, with a fixed random threshold in each place. Values that it
    already represents do not change."""
    dropped = DROPPED_BITS.get(dtype)
    if dropped is None:
        return values
    generator = torch.Generator(values.device).manual_seed(seed)
    thresholds = torch.randint(1 << dropped, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    bits = values.contiguous().view(torch.int32)
    return thresholds.add_(bits).bitwise_and_(-1 << dropped).view(torch.float32)


class AdaptedLinear(nn.Module):
    """The merged linear layer, with gradients for A and B and none for the weight."""

    def __init__(self, plain: Any, adapter: Any) -> None:
        super().__init__()
        [name] = adapter.active_adapters
        self.weight, self.bias = plain.weight, plain.bias
        self.lora_a, self.lora_b = adapter.lora_A[name].weight, adapter.lora_B[name].weight
        self.scaling, self.transposed = float(adapter.scaling[name]), bool(adapter.fan_in_fan_out)

    @staticmethod
    def supports(adapter: Any) -> bool:
        """Linear layers, also transposed (GPT-2), with A and B alone."""
        if len(adapter.active_adapters) != 1 or not hasattr(adapter, "fan_in_fan_out"):
            return False
        [name] = adapter.active_adapters
        parts = [adapter.lora_A[name], adapter.lora_B[name]] if name in adapter.lora_A else []
        return bool(parts) and all(type(part) is nn.Linear and part.bias is None for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        out: Tensor = MergedProduct.apply(x, self.lora_a, self.lora_b, weight, self.bias, self.scaling)  # type: ignore[no-untyped-call]
        return out


class MergedProduct(torch.autograd.Function):
    """x·Wᵀ with W = W₀ + s·B·A already summed:

        ∂A = s·(∂y·B)ᵀ·x        ∂B = s·∂yᵀ·(x·Aᵀ)        ∂x = ∂y·W

    The gradient of W itself, which would take as long as ∂x, is never computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lora_a: Tensor, lora_b: Tensor, weight: Tensor, bias: Tensor | None, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(x, lora_a, lora_b, weight)
        ctx.scaling = scaling
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, lora_a, lora_b, weight = ctx.saved_tensors
        grad, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        grad_a, grad_b = adapter_gradients(grad, rows, lora_a, lora_b, ctx.scaling)
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        return grad_x, grad_a, grad_b, None, None, None


class PassLinear(nn.Module):
    """`AdaptedLinear` over a base weight that is gathered for each pass: adds the adapter to it, forward and backward,
    and keeps no sum."""

    def __init__(self, adapter: Any, seed: int) -> None:
        super().__init__()
        [name] = adapter.active_adapters
        self.base, self.seed = adapter.base_layer, seed
        self.lora_a, self.lora_b = adapter.lora_A[name].weight, adapter.lora_B[name].weight
        self.scaling, self.transposed = float(adapter.scaling[name]), bool(adapter.fan_in_fan_out)

    @property
    def bias(self) -> Any:
        return self.base.bias

    def merged(self, weight: Tensor) -> Tensor:
        """[out, in]"""
        delta = (self.lora_b @ self.lora_a).detach() * self.scaling
        total = _sum(weight.detach(), [delta.t() if self.transposed else delta], self.seed).to(weight.dtype)
        return total.t() if self.transposed else total

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = PassProduct.apply(x, self.lora_a, self.lora_b, self.base.weight, self)  # type: ignore[no-untyped-call]
        return out


class PassProduct(torch.autograd.Function):
    """`MergedProduct` that keeps the base weight alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lora_a: Tensor, lora_b: Tensor, weight: Tensor, layer: PassLinear) -> Tensor:
        ctx.save_for_backward(x, lora_a, lora_b, weight)
        ctx.layer = layer
        return linear(x, layer.merged(weight), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, lora_a, lora_b, weight = ctx.saved_tensors
        grad, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        grad_a, grad_b = adapter_gradients(grad, rows, lora_a, lora_b, ctx.layer.scaling)
        grad_x = grads[0] @ ctx.layer.merged(weight) if ctx.needs_input_grad[0] else None
        return grad_x, grad_a, grad_b, None, None


def adapter_gradients(grad: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """∂A and ∂B of a layer's product, from the gradient of its output and its input, [tokens, …]."""
    grad_a = (grad @ lora_b.to(grad.dtype)).t() @ x
    grad_b = grad.t() @ (x @ lora_a.to(x.dtype).t())
    return grad_a.to(lora_a) * scaling, grad_b.to(lora_b) * scaling
