"""`create_reward_files`: writes a template for a reward function and a few rollouts to test it on."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from toolwise.checks.starter_files import check_name, check_unused
from toolwise.rewards.function import Mode
from toolwise.serialization.files import write_atomic

_STARTERS = files("toolwise.checks.reward") / "starters"
PLACEHOLDER_NAME = "my_reward"
"""Name of the function in the templates."""


def create_reward_files(folder: Path, name: str = PLACEHOLDER_NAME, mode: Mode = "pointwise") -> tuple[Path, Path]:
    """Write NAME.py and NAME_rollouts.jsonl; neither may exist yet."""
    check_name(name)
    code, rollouts = folder / f"{name}.py", folder / f"{name}_rollouts.jsonl"
    check_unused([code, rollouts])
    text = (_STARTERS / f"{mode}.py").read_text("utf-8")
    write_atomic(code, text.replace(PLACEHOLDER_NAME, name).encode())
    write_atomic(rollouts, (_STARTERS / "rollouts.jsonl").read_bytes())
    return code, rollouts
