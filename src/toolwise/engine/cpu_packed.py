"""Linear layers computed by oneDNN, whose rounding differs from that of `torch.nn.functional.linear`.

`PackedProjections` keeps weights in oneDNN's own layout, for weights that are served and stay as they are: a product
with few rows takes about two thirds of the time, since the weights are not rearranged in each call; it costs a second
copy of them. `OneDnnProjections` uses the weights as they are: for many rows at a time, where MKL is slower on some
processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from toolwise.concurrency.memory import free_memory

Projection = Callable[[Tensor], Tensor]
MIN_WEIGHTS = 20_000_000
"""In a smaller model, calls cost more than products."""
ROWS_HINT = 256
"""Number of rows that the layout is chosen for; it suits few rows as well as thousands."""


def packing_problem(weights: int) -> str | None:
    """Why the weights of a model of this size are better left as they are; None if there is no reason."""
    if weights < MIN_WEIGHTS:
        return "the model is small"
    if (problem := onednn_problem()) is not None:
        return problem
    return f"{4 * weights >> 20} MB more do not fit the memory well" if free_memory() < 8 * weights else None


def onednn_problem() -> str | None:
    """Why nothing can be packed at all; None if it can."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    usable = available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return None if usable else "this torch has no oneDNN"


class PackedProjections:
    """Packs layers when they are first asked for."""

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], tuple[list[Tensor], Tensor, Tensor | None]] = {}
        """By the ids of the weights, which are kept so that no others get their ids."""

    def joint(self, modules: Sequence[Any]) -> tuple[Projection, ...]:
        """The products of layers that have the same input: one, side by side."""
        return (self(*modules),)

    def __call__(self, *modules: Any) -> Projection:
        """The product of one layer, or of several that have the same input, side by side."""
        packed, bias = self._pack(modules)

        def project(states: Tensor) -> Tensor:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
            return out

        return project

    def gated(self, gate: Any, up: Any) -> Projection:
        """silu(gate(x)) * up(x): each product is stored once, with what follows it."""
        (gate_packed, gate_bias), (up_packed, up_bias) = self._pack((gate,)), self._pack((up,))

        def project(states: Tensor) -> Tensor:
            gates = torch.ops.mkldnn._linear_pointwise(states, gate_packed, gate_bias, "swish", [], "")
            out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, gates, up_packed, up_bias, "mul")
            return out

        return project

    def _pack(self, modules: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        weights = [module.weight for module in modules]
        key = tuple(map(id, weights))
        if key not in self._packed:
            with torch.inference_mode():
                weight = weights[0] if len(weights) == 1 else torch.cat(weights)
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
                self._packed[key] = weights, packed, _joined_bias(modules)
        _, packed, bias = self._packed[key]
        return packed, bias

    def clear(self) -> None:
        """The weights have changed."""
        self._packed.clear()


class OneDnnProjections:
    """Nothing is kept."""

    def joint(self, modules: Sequence[Any]) -> tuple[Projection, ...]:
        """The products of layers that have the same input: one after the other."""
        return tuple(map(self, modules))

    def __call__(self, module: Any) -> Projection:
        weight, bias = module.weight, module.bias

        def project(states: Tensor) -> Tensor:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
            return out

        return project

    def gated(self, gate: Any, up: Any) -> Projection:
        """silu(gate(x)) * up(x)."""

        def project(states: Tensor) -> Tensor:
            gates = torch.ops.mkldnn._linear_pointwise(states, gate.weight, gate.bias, "swish", [], "")
            out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, gates, up.weight, up.bias, "mul")
            return out

        return project


def _joined_bias(modules: Sequence[Any]) -> Tensor | None:
    if all(module.bias is None for module in modules):
        return None
    if len(modules) == 1:
        return modules[0].bias  # type: ignore[no-any-return]
    parts = [m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in modules]
    return torch.cat(parts)
