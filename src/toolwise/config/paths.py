"""Resolve the paths in a configuration file, which are relative to that file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PathRule = Callable[[Any, Path], Any]


def resolve_paths(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`settings` with files, folders and references to Python files resolved against `folder`.

    Values that are not paths or have the wrong type are left for validation.
    """
    resolved: dict[str, Any] = copy.deepcopy(dict(settings))
    for pattern, rule in _PATH_RULES.items():
        _apply(resolved, pattern.split("."), rule, folder)
    return resolved


def relative_paths(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`settings` with task files and references to Python files relative to `folder` if they are inside it."""
    relative: dict[str, Any] = copy.deepcopy(dict(settings))
    for pattern, rule in _PATH_RULES.items():
        if pattern.startswith("data.") or rule in (_reference, _tool):
            _apply(relative, pattern.split("."), _relative, folder)
    return relative


def _apply(value: Any, keys: list[str], rule: PathRule, folder: Path) -> None:
    key, *rest = keys
    matches: list[Any] = [key] if isinstance(value, dict) and key in value and key != "*" else []
    if key == "*" and isinstance(value, list | dict):
        matches = list(range(len(value)) if isinstance(value, list) else value)
    for match in matches:
        if rest:
            _apply(value[match], rest, rule, folder)
        else:
            value[match] = rule(value[match], folder)


def _path(value: Any, folder: Path) -> Any:
    return str(folder / Path(value).expanduser()) if isinstance(value, str | Path) and str(value) else value


def _sources(value: Any, folder: Path) -> Any:
    """A task file, or a list of files and of tables with a `path`."""
    if isinstance(value, list):
        return [_sources(item, folder) for item in value]
    return value | {"path": _path(value["path"], folder)} if _is_source(value) else _path(value, folder)


def _is_source(value: Any) -> bool:
    return isinstance(value, dict) and "path" in value


def _existing_folder(value: Any, folder: Path) -> Any:
    """Resolve existing folders only: anything else may be a hub name."""
    resolved = _path(value, folder)
    return resolved if isinstance(value, str) and value and Path(resolved).is_dir() else value


def _wording(value: Any, folder: Path) -> Any:
    return value if value == "silent" else _path(value, folder)


def _reference(value: Any, folder: Path) -> Any:
    if not isinstance(value, str):
        return value
    file, colon, name = (value, "", "") if value.endswith(".py") else value.rpartition(":")
    return f"{folder / Path(file).expanduser()}{colon}{name}" if file.endswith(".py") else value


def _program(value: Any, folder: Path) -> Any:
    """Resolve existing files only: anything else is a program on PATH, or an argument."""
    resolved = _path(value, folder)
    return resolved if isinstance(value, str) and value and Path(resolved).is_file() else value


def _relative(value: Any, folder: Path) -> Any:
    if isinstance(value, dict) and "name" in value:  # a tool, tracker or callback with its options
        return value | {"name": _relative(value["name"], folder)}
    if isinstance(value, list):
        return [_relative(item, folder) for item in value]
    if _is_source(value):
        return value | {"path": _relative(value["path"], folder)}
    text = str(value) if isinstance(value, str | Path) else ""
    file, colon, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    if not Path(file).is_absolute() or not Path(file).resolve().is_relative_to(folder):
        return value
    return f"{Path(file).resolve().relative_to(folder)}{colon}{name}"


def _tool(value: Any, folder: Path) -> Any:
    """A tool given by name or as a table. Which options of user-defined tools are paths is unknown."""
    if not isinstance(value, dict):
        return _reference(value, folder)
    rules = dict.fromkeys(_TOOL_PATHS.get(str(value.get("name")), ()), _path) | {"name": _reference}
    return {key: rules[key](option, folder) if key in rules else option for key, option in value.items()}


_TOOL_PATHS = {"search": ("folder", "file", "cache", "wordnet"), "mcp": ("cwd",)}
_PATH_RULES: dict[str, PathRule] = {
    "data.train": _sources,
    "data.val": _sources,
    "data.cache": _path,
    "model.path": _existing_folder,
    "model.base": _existing_folder,
    "model.chat_template": _path,
    "rollout.tool_parser": _reference,
    "rollout.vllm.weights_dir": _path,
    "rollout.grammar.json_schema": _path,
    "rollout.grammar.lark": _path,
    "critic.path": _existing_folder,
    "tools.*": _tool,
    "data.sampler": _reference,
    "router.name": _reference,
    "router.labels": _path,
    "router.wording": _wording,
    "router.policies.*.path": _existing_folder,
    "env.name": _reference,
    "env.interaction": _reference,
    "agent.run": _reference,
    "agent.python": _program,
    "agent.command.*": _program,
    "env.kwargs.format_observation": _reference,
    "env.kwargs.parse_action": _reference,
    "env.kwargs.state_of": _reference,
    "reward.function": _reference,
    "reward.parts.*.function": _reference,
    "reward.sandbox.read.*": _path,
    "algorithm.adv_estimator": _reference,
    "algorithm.rlvcr.levels": _path,
    "actor.policy_loss": _reference,
    "trainer.trackers.*": _reference,
    "trainer.trackers.*.name": _reference,
    "trainer.callbacks.*": _reference,
    "trainer.callbacks.*.name": _reference,
}
