"""Linear layers with weights in oneDNN's own layout, for weights that are served and stay as they are.

A product with few rows takes about two thirds of the time, since the weights are not rearranged in each call; it costs
a second copy of them. Rounding differs from that of `torch.nn.functional.linear`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MIN_WEIGHTS = 20_000_000
"""In a smaller model, calls cost more than products."""
ROWS_HINT = 256
"""Number of rows that the layout is chosen for; it suits few rows as well as thousands."""


def packing_problem(weights: int) -> str | None:
    """Why the weights of a model of this size are better left as they are; None if there is no reason."""
    if weights < MIN_WEIGHTS:
        return "the model is small"
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch has no oneDNN"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{4 * weights >> 20} MB more do not fit the memory well" if free < 8 * weights else None


class PackedProjections:
    """Packs each layer when it is first asked for."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}
        """By the id of the weight, which is kept so that no other gets its id."""

    def __call__(self, module: Any) -> Callable[[Tensor], Tensor]:
        weight, bias = module.weight, module.bias
        if id(weight) not in self._packed:
            with torch.inference_mode():
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

            def project(states: Tensor) -> Tensor:
                out: Tensor = torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
                return out

            self._packed[id(weight)] = weight, project
        return self._packed[id(weight)][1]

    def clear(self) -> None:
        """The weights have changed."""
        self._packed.clear()
