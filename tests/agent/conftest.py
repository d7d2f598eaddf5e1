"""A routed model as exported: the small model, a head with chosen weights, and their metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trained_router import routed_folder


@pytest.fixture(scope="session")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head prefers to calculate."""
    torch.set_num_threads(1)
    return routed_folder(tmp_path_factory.mktemp("routed") / "model", bias=[0.0, -1.0, 2.0], eval_mode="argmax")


@pytest.fixture(scope="session")
def make_routed_in() -> Any:
    torch.set_num_threads(1)
    return routed_folder


@pytest.fixture
def make_routed(tmp_path: Path) -> Any:
    torch.set_num_threads(1)
    return lambda **how: routed_folder(tmp_path / "routed", **how)
