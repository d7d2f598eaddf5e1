"""The rollouts that `toolwise init reward` writes, as rows."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def sample_rows() -> list[dict[str, Any]]:
    """Three tasks with four rollouts each: correct directly, correct after a tool call, wrong, and no answer."""
    text = (files("toolwise.checks.reward") / "starters" / "rollouts.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]
