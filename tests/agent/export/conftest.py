"""A run folder without a run: configuration, metrics, and checkpoints of a variant of the small model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from toolwise.config.loader import to_toml
from toolwise.config.schema import RunConfig
from toolwise.models import BUILTIN
from toolwise.training.checkpoint import save


def write_model(folder: Path) -> None:
    shutil.copytree(BUILTIN / "small", folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 0.9
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: copy it before changing it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    settings: dict[str, Any] = {
        "name": "tiny | run",
        "seed": 7,
        "data": {"train": "/somewhere/private/train.jsonl", "val": "/somewhere/private/heldout.jsonl", "batch_size": 2},
        "tools": ["calculator", {"name": "/somewhere/private/mine.py:look_up", "price": 1.0}],
        "reward": {"function": "/somewhere/private/judge.py:judge"},
        "rollout": {"n": 4},
        "actor": {"lr": 3e-5},
    }
    for step, score in ((0, 0.25), (5, 0.75), (10, 0.5)):
        figures = {"score": score, "cost": float(step)}
        facts = {"toolwise": "0.9.9"}
        save(run / "checkpoints", step, {"a": {}}, extra_files={"model": write_model}, figures=figures, facts=facts)
    lines: list[dict[str, Any]] = [
        {"step": 0, "eval/score": 0.25, "eval/lookup/score": 0.125, "eval/lookup/cost": 2.0},
        {"step": 5, "score/mean": 0.3},
        {"step": 5, "eval/score": 0.75, "eval/lookup/score": None},
        {"step": 10, "eval/score": 0.5},
        {"step": 11, "eval/score": 0.9},
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    (run / "config.toml").write_text(to_toml(RunConfig.model_validate(settings)), encoding="utf-8")
    return run
