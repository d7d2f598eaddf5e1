"""The reference: the model as it was before any update, whose log-probs say how far the policy has gone."""

from __future__ import annotations

import copy
from typing import Any

from toolwise.learner.lora import Adapters


def build_reference(model: Any, adapters: Adapters | None) -> Any:
    """The model that log-probs are compared with.

    With adapters it is the policy's own model without them, which needs no memory. Else it is a copy of the weights,
    taken now: before a run's checkpoint is loaded, so that a resumed run is held to the same reference.
    """
    if adapters is not None:
        return adapters.base_model()
    return copy.deepcopy(model).eval().requires_grad_(False)
