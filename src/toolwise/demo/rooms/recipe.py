"""Reinforcement learning in the house of rooms: the settings that runs of every estimator share, for one CPU core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAX_NEW_TOKENS = 64
"""Twice the longest taught thought, so that one that goes astray is cut."""


def rooms_config(model: str | Path, tasks: Path | None = None, *, seed: int = 0) -> dict[str, Any]:
    """A configuration: what is in it is the world's, and an estimator's own settings come over it.

    `tasks` is a folder with train.jsonl and heldout.jsonl (`toolwise.demo.rooms.demonstrations`); without it the caller
    hands tasks over. The world reads `<action>` itself, so that the conversation keeps what was said in full.
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
