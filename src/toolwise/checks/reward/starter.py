"""`create_reward_files`: writes a template for a reward function and a few rollouts to test it on."""

from __future__ import annotations

import keyword
from importlib.resources import files
from pathlib import Path

from toolwise.errors import ConfigError
from toolwise.rewards.function import Mode
from toolwise.serialization.files import write_atomic

_STARTERS = files("toolwise.checks.reward") / "starters"
PLACEHOLDER_NAME = "my_reward"
"""Name of the function in the templates."""


def create_reward_files(folder: Path, name: str = PLACEHOLDER_NAME, mode: Mode = "pointwise") -> tuple[Path, Path]:
    """Write NAME.py and NAME_rollouts.jsonl; neither may exist yet."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a valid function name; use letters, digits and _, such as my_reward")
    code, rollouts = folder / f"{name}.py", folder / f"{name}_rollouts.jsonl"
    for path in (code, rollouts):
        if path.exists():
            raise ConfigError(f"{path} already exists; give another name, or remove the file")
    text = (_STARTERS / f"{mode}.py").read_text("utf-8")
    write_atomic(code, text.replace(PLACEHOLDER_NAME, name).encode())
    write_atomic(rollouts, (_STARTERS / "rollouts.jsonl").read_bytes())
    return code, rollouts
