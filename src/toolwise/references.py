"""`package.module:name` and `path/to/file.py:name` -> the Python object: how configuration files name code."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from toolwise.errors import ConfigError, RewardError
from toolwise.siblings import siblings_of

WORKER = "TOOLWISE_WORKER"
"""Set in the environment of worker processes, which load other people's files again."""


def in_worker() -> bool:
    """Whether this process only loads functions for another: whatever starts work by being imported must not."""
    return os.environ.get(WORKER) == "1"


def load_reference(reference: str, *, what: str) -> Any:
    """The object that `reference` names; `what` says in an error what was looked for."""
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{what}: {reference!r} names nothing; write package.module:name or path/to/file.py:name")
    module = load_module(place, what=what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what}: {place} has no {name!r}{did_you_mean(name, vars(module))}")
        found = getattr(found, part)
    return found


def load_module(place: str, *, what: str) -> ModuleType:
    """A module by dotted name or by file."""
    try:
        return _load_file(place, what) if place.endswith(".py") else importlib.import_module(place)
    except (ConfigError, RewardError):
        raise
    except ModuleNotFoundError as fault:
        raise ConfigError(f"{what}: cannot import {place!r} ({fault}); or write path/to/file.py:name") from fault
    except Exception as fault:  # whatever other people's code raises on import is theirs to read, in one line
        raise ConfigError(f"{what}: importing {place!r} failed: {type(fault).__name__}: {fault}") from fault


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _load_file(source: str, what: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {source!r}")
    # Loaded once a path: two references into one file must see the same module state.
    name = f"toolwise_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {source!r} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    vars(module)["__builtins__"] = siblings_of(path).builtins
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
