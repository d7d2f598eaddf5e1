"""The process's random number generators continue from the state in a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from toolwise.training.checkpoint import RngState, latest, save


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
