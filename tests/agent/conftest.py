"""A routed model as exported: the small model, a head with chosen weights, and their metadata."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from toolwise.config.router import RouterConfig
from toolwise.models import locate
from toolwise.routing.families import ROUTES
from toolwise.routing.head.head import HeadSettings, RouterHead, save_head


def routed_folder(
    folder: Path, *, bias: Any, mode: str = "policy", spread: float = 0.0, bins: int = 0, **router: Any
) -> Path:
    """`spread` scales how much the head's output depends on the prompt; `bias` has that of every random budget."""
    shutil.copytree(locate("builtin:small"), folder)
    width = int(json.loads((folder / "config.json").read_text())["hidden_size"])
    head = RouterHead(HeadSettings(width=width, routes=tuple(map(str, ROUTES)), mode=mode, bins=bins))  # type: ignore[arg-type]
    with torch.no_grad():
        head.out.bias.copy_(torch.tensor(bias))
        head.out.weight.normal_(std=spread, generator=torch.Generator().manual_seed(0))
    # The small model was trained without route text: "silent" hides tools and adds none.
    config = RouterConfig(**({"enable": True, "mode": mode, "wording": "silent"} | router))  # type: ignore[arg-type]
    told = {"router": config.model_dump(mode="json", exclude={"labels"}), "multipliers": {"cost": 0.5}}
    save_head(head, folder, told)
    return folder


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
