"""The model that ships with a router head that was never trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolwise.agent.inference import TrainedRouter
from toolwise.agent.loader import load_router
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
