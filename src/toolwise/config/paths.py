"""Paths in a configuration file are relative to that file: which settings are paths, and what becomes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PathRule = Callable[[Any, Path], Any]


def resolve_paths(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`settings` with files, folders and references to Python files taken from `folder`.

    What is no path, or of a wrong type, is left for others to judge.
    """
    placed: dict[str, Any] = copy.deepcopy(dict(settings))
    for pattern, place in _PATH_RULES.items():
        _apply(placed, pattern.split("."), place, folder)
    return placed


def _apply(value: Any, keys: list[str], place: PathRule, folder: Path) -> None:
    key, deeper = keys[0], keys[1:]
    found: list[Any] = [key] if isinstance(value, dict) and key in value else []
    if key == "*":
        found = list(range(len(value))) if isinstance(value, list) else []
    for where in found:
        if deeper:
            _apply(value[where], deeper, place, folder)
        else:
            value[where] = place(value[where], folder)


def _path(value: Any, folder: Path) -> Any:
    return str(folder / Path(value).expanduser()) if isinstance(value, str | Path) and str(value) else value


def _existing_folder(value: Any, folder: Path) -> Any:
    """Anything else may be a hub's name."""
    placed = _path(value, folder)
    return placed if isinstance(value, str) and value and Path(placed).is_dir() else value


def _wording(value: Any, folder: Path) -> Any:
    return value if value == "silent" else _path(value, folder)


def _reference(value: Any, folder: Path) -> Any:
    if not isinstance(value, str):
        return value
    file, colon, name = (value, "", "") if value.endswith(".py") else value.rpartition(":")
    return f"{folder / Path(file).expanduser()}{colon}{name}" if file.endswith(".py") else value


def _tool(value: Any, folder: Path) -> Any:
    """A tool by its name, or by a table; of the tools of others nobody knows which options are paths."""
    if not isinstance(value, dict):
        return _reference(value, folder)
    paths = _TOOL_PATHS.get(str(value.get("name")), ())
    placed = {key: _path(option, folder) if key in paths else option for key, option in value.items()}
    return placed | ({"name": _reference(value["name"], folder)} if "name" in value else {})


_TOOL_PATHS = {"search": ("folder", "file", "cache", "wordnet"), "mcp": ("cwd",)}
_PATH_RULES: dict[str, PathRule] = {
    "data.train": _path,
    "data.val": _path,
    "model.path": _existing_folder,
    "rollout.vllm.weights_dir": _path,
    "rollout.grammar.json_schema": _path,
    "rollout.grammar.lark": _path,
    "critic.path": _existing_folder,
    "tools.*": _tool,
    "router.labels": _path,
    "router.wording": _wording,
    "env.name": _reference,
    "env.interaction": _reference,
    "env.kwargs.format_observation": _reference,
    "env.kwargs.parse_action": _reference,
    "env.kwargs.state_of": _reference,
    "reward.function": _reference,
    "reward.parts.*.function": _reference,
    "reward.sandbox.read.*": _path,
    "algorithm.rlvcr.levels": _path,
}
