"""The model that ships with a router head that was never trained, or has chosen weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolwise.agent.inference import TrainedRouter
from toolwise.agent.loader import load_router
from toolwise.config.router import RouterConfig
from toolwise.models import locate
from toolwise.routing.families import ROUTES
from toolwise.routing.head.head import HeadSettings, RouterHead, save_head


def small_router(folder: Path, routes: Sequence[Mapping[str, Any]] = ()) -> TrainedRouter:
    """`routes`: a user's own, as in the settings."""
    torch.set_num_threads(1)
    model = folder / "routed"
    shutil.copytree(locate("builtin:small"), model)
    width = int(json.loads((model / "config.json").read_text())["hidden_size"])
    names = tuple(str(route["name"]) for route in routes) or tuple(map(str, ROUTES))
    save_head(RouterHead(HeadSettings(width=width, routes=names)), model, {"router": {"routes": list(routes)}})
    return load_router(model, tools=["calculator", "search"])


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
