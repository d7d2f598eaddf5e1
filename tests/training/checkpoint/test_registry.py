"""State is registered by name, saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolwise.errors import CheckpointError
from toolwise.training.checkpoint import StateRegistry, save


class Part:
    """The least that can be registered."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_the_registry_saves_and_restores_every_part(tmp_path: Path) -> None:
    registry, other = StateRegistry(), StateRegistry()
    parts = {"a": Part([1]), "b": Part((2,))}
    fresh = {"a": Part(None), "b": Part(None)}
    for name in parts:
        registry.register(name, parts[name])
        other.register(name, fresh[name])
    other.load_state_dict(save(tmp_path, 1, registry.state_dict()).state())
    assert (fresh["a"].value, fresh["b"].value) == ([1], (2,))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "manifest", "a b"])
def test_a_part_has_a_name_that_can_be_a_file(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a part"):
        StateRegistry().register(name, Part(1))


def test_a_name_is_registered_once() -> None:
    registry = StateRegistry()
    registry.register("router", Part(1))
    with pytest.raises(ValueError, match="'router' is already registered"):
        registry.register("router", Part(2))


def test_a_checkpoint_of_other_parts_is_refused_and_nothing_is_touched() -> None:
    registry = StateRegistry()
    part = Part(1)
    registry.register("learner", part)
    registry.register("router", Part(2))
    with pytest.raises(CheckpointError, match="lacks router; it has critic, unknown to this run"):
        registry.load_state_dict({"learner": {"value": 9}, "critic": {}})
    assert part.value == 1
