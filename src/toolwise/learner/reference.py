"""The reference model for KL: the policy as it was before any update."""

from __future__ import annotations

import copy
from typing import Any

from toolwise.learner.lora import Adapters


def build_reference(model: Any, adapters: Adapters | None) -> Any:
    """With adapters, the policy's model without them, which needs no extra memory. Otherwise a copy of the weights,
    taken before the run's checkpoint is loaded, so that a resumed run keeps the same reference."""
    if adapters is not None:
        return adapters.base_model()
    return copy.deepcopy(model).eval().requires_grad_(False)
