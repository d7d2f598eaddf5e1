"""Models that come with Python code: it runs only if a setting allows it, and is always named in a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.models.folder import read_json_object

log = logging.getLogger("toolwise.models")


def remote_code_files(location: str) -> list[str]:
    """Python files that the configs of a local folder refer to, and hub kernels."""
    folder = Path(location)
    names: dict[str, None] = {}
    for file in ("config.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            names |= dict.fromkeys(_referenced_code(read_json_object(folder / file)))
    return list(names)


def remote_code_error(path: str, location: str) -> ModelError:
    files = ", ".join(remote_code_files(location)) or "files beside its weights"
    return ModelError(
        f"the model {path!r} needs to run its own Python code ({files}): review it first; "
        "model.trust_remote_code = true allows it (sft: --trust-remote-code)"
    )


def check_hub_kernels(path: str, location: str) -> None:
    """Reject kernels from a hub: transformers would load them without asking."""
    if any("/" in name and not name.endswith(".py") for name in remote_code_files(location)):
        raise remote_code_error(path, location)


def warn_remote_code(path: str, location: str) -> None:
    """Logged every time, as a warning so that the default log level shows it."""
    names = remote_code_files(location)
    if names:
        log.warning(
            "model.trust_remote_code is set: Python code of %s runs with all your permissions: %s",
            path,
            ", ".join(names),
        )


def _referenced_code(settings: Mapping[str, Any]) -> Iterator[str]:
    auto_map = settings.get("auto_map")
    for entry in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
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
