"""Base configuration for RL in the rooms environment, shared by all estimators; for one CPU core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAX_NEW_TOKENS = 64
"""Twice the longest thought in the SFT data; longer ones are cut off."""


def rooms_config(model: str | Path, tasks: Path | None = None, *, seed: int = 0) -> dict[str, Any]:
    """A configuration for the environment; callers add the settings of an estimator.

    `tasks` is a folder with train.jsonl and heldout.jsonl (`toolwise.demo.rooms.demonstrations`); without it the caller
    passes tasks itself. The environment parses `<action>`, so the conversation keeps the full text of each reply.
    """
    data = {"train": str(tasks / "train.jsonl"), "val": str(tasks / "heldout.jsonl")} if tasks else {}
    return {
        "name": "rooms",
        "seed": seed,
        "model": {"path": str(model)},
        "data": {**data, "batch_size": 8},
        "env": {"name": "toolwise.demo.rooms.env:RoomsEnv"},
        "rollout": {"n": 16, "max_new_tokens": MAX_NEW_TOKENS, "tool_parser": "none"},
        "multi_turn": {"max_turns": 8, "max_invalid_in_a_row": 3},
        "reward": {"function": "env"},
        "actor": {"lr": 1e-4, "warmup_steps": 3},
        "validation": {"do_sample": True},
        "trainer": {"total_steps": 80, "console": False},
    }
