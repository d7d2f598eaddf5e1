"""The reference: the model as it was before any update, whose log-probs say how far the policy has gone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from toolwise.learner.lora import Adapters


class Reference(Protocol):
    """Gives the reference model to whoever is about to compute with it."""

    def model(self) -> Any:
        """A context manager."""
        ...


class FrozenCopy:
    """A copy of the weights, taken when it is made: before a run's checkpoint is loaded, so that a resumed run is held
    to the same reference."""

    def __init__(self, model: Any) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)

    @contextmanager
    def model(self) -> Iterator[Any]:
        yield self._model


class WithoutAdapters:
    """The policy's own model with its LoRA adapters switched off: no second copy."""

    def __init__(self, model: Any, adapters: Adapters) -> None:
        self._model = model
        self._adapters = adapters

    @contextmanager
    def model(self) -> Iterator[Any]:
        with self._adapters.disabled():
            yield self._model


def reference_of(model: Any, adapters: Adapters | None) -> Reference:
    return FrozenCopy(model) if adapters is None else WithoutAdapters(model, adapters)
