"""Writes starters for a tool, an environment and a run; those for rewards are in `checks.reward.starter`."""

from __future__ import annotations

import keyword
from importlib.resources import files
from pathlib import Path
from typing import Literal

from toolwise.errors import ConfigError
from toolwise.serialization.files import write_atomic

Kind = Literal["tool", "env", "config"]

_FOLDER = files("toolwise.checks.starters")
_TEMPLATES = {
    "tool": ("my_tool", (".py",)),
    "env": ("my_env", (".py",)),
    "config": ("my_run", (".toml", "_train.jsonl", "_heldout.jsonl")),
}
"""The name in the templates of each kind, and the ends of their file names."""


def create_starter(folder: Path, kind: Kind, name: str) -> list[Path]:
    """Write the files of a starter under `name`; none may exist yet. The first is the one to edit."""
    check_name(name)
    placeholder, ends = _TEMPLATES[kind]
    paths = [folder / f"{name}{end}" for end in ends]
    check_unused(paths)
    for path, end in zip(paths, ends, strict=True):
        text = (_FOLDER / f"{placeholder}{end}").read_text("utf-8")
        text = text.replace(class_name(placeholder), class_name(name)).replace(placeholder, name)
        write_atomic(path, text.encode())
    return paths


def class_name(name: str) -> str:
    """my_env -> MyEnv."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")) or name


def check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a valid function name; use letters, digits and _, such as my_reward")


def check_unused(paths: list[Path]) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} already exists; give another name, or remove the file")
