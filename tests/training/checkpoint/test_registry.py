"""State is registered by name, saved and restored; random number generators continue from theirs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolwise.errors import CheckpointError
from toolwise.training.checkpoint import RngState, StateRegistry, latest, save


class Part:
    """The least that can be registered."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_the_registry_saves_and_restores_every_part(tmp_path: Path) -> None:
    fresh = {"a": Part(None), "b": Part(None)}
    saved = StateRegistry({"a": Part([1]), "b": Part((2,))}).state_dict()
    StateRegistry(fresh).load_state_dict(save(tmp_path, 1, saved).state())
    assert (fresh["a"].value, fresh["b"].value) == ([1], (2,))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "manifest", "a b"])
def test_a_part_has_a_name_that_can_be_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot name a part"):
        save(tmp_path, 1, StateRegistry({name: Part(1)}).state_dict())


def test_a_checkpoint_of_other_parts_is_refused_and_nothing_is_touched() -> None:
    part = Part(1)
    with pytest.raises(CheckpointError, match="lacks router; it has critic, unknown to this run"):
        StateRegistry({"learner": part, "router": Part(2)}).load_state_dict({"learner": {"value": 9}, "critic": {}})
    assert part.value == 1


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.random()), float(torch.rand(1))


def test_every_generator_continues_from_its_saved_state(tmp_path: Path) -> None:
    random.gauss(0, 1)  # Python caches the second of two samples, which is part of the state
    save(tmp_path, 1, {"randomness": RngState().state_dict()})
    first = [draw() for _ in range(3)]
    draw()
    found = latest(tmp_path)
    assert found is not None
    RngState().load_state_dict(found.state()["randomness"])
    assert [draw() for _ in range(3)] == first


def test_a_different_number_of_gpus_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    state = RngState().state_dict()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    RngState().load_state_dict(state)
    assert "their random state is not restored" in caplog.text
