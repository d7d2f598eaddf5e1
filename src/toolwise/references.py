"""`module:name` and `path.py:name` -> the Python object: how configuration files name code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from toolwise.errors import ConfigError


def load_reference(reference: str, *, what: str) -> Any:
    """The object that `reference` names; `what` says in an error what was looked for."""
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{what} {reference!r}: write it as package.module:name or path/to/file.py:name")
    found: Any = load_module(place, what=what)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what} {reference!r}: {place} has no {name!r}")
        found = getattr(found, part)
    return found


def load_module(place: str, *, what: str) -> ModuleType:
    """A module by dotted name or by file."""
    try:
        return _load_file(Path(place), what) if place.endswith(".py") else importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as fault:  # whatever other people's code raises on import is theirs to read, in one line
        raise ConfigError(f"{what} {place!r} cannot be imported: {type(fault).__name__}: {fault}") from fault


def _load_file(path: Path, what: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}")
    name = f"toolwise_file_{abs(hash(str(path))):x}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
