"""Models that bring Python code along. It runs only where a setting says so, and then it is said which code."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.models.folder import read_json_object

log = logging.getLogger("toolwise.models")


def remote_code_files(location: str) -> list[str]:
    """The Python files that the settings of a local folder name for loading it, and kernels of a hub's."""
    folder = Path(location)
    names: dict[str, None] = {}
    for file in ("config.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            names |= dict.fromkeys(_referenced_code(read_json_object(folder / file)))
    return list(names)


def remote_code_error(path: str, location: str) -> ModelError:
    wants = ", ".join(remote_code_files(location)) or "files beside its weights"
    return ModelError(
        f"the model {path!r} wants to run Python code of its own ({wants}): read it first; "
        "model.trust_remote_code = true allows it (sft: --trust-remote-code)"
    )


def check_hub_kernels(path: str, location: str) -> None:
    """Code that a hub would deliver is not asked for by transformers: refused here."""
    if any("/" in name and not name.endswith(".py") for name in remote_code_files(location)):
        raise remote_code_error(path, location)


def warn_remote_code(path: str, location: str) -> None:
    """Said every time, and louder than the log's usual level lets through."""
    names = remote_code_files(location) if Path(location).is_dir() else ["whatever the hub has for it"]
    if names:
        log.warning(
            "model.trust_remote_code is set: Python code of %s runs with all your rights: %s", path, ", ".join(names)
        )


def _referenced_code(settings: Mapping[str, Any]) -> Iterator[str]:
    mapped = settings.get("auto_map")
    for entry in mapped.values() if isinstance(mapped, dict) else [mapped]:
        for reference in entry if isinstance(entry, list) else [entry]:
            if isinstance(reference, str):  # [owner/name--]module.Class
                yield f"{reference.rpartition('.')[0]}.py"
    for name in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        kernel = settings.get(name)
        for value in kernel.values() if isinstance(kernel, dict) else [kernel]:
            if isinstance(value, str) and "/" in value:
                yield value
    for name, part in settings.items():
        if isinstance(part, dict) and name.endswith("_config"):
            yield from _referenced_code(part)
