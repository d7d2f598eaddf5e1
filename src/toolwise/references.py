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
from weakref import WeakKeyDictionary

from toolwise.errors import ConfigError, RewardError
from toolwise.siblings import siblings_of

WORKER = "TOOLWISE_WORKER"
"""Set in the environment of worker processes, which load other people's files again."""

GIVEN = "given in Python: "
"""Begins what a run's config.toml says of a tool or a reward that it cannot name."""

_registered: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def register(target: Any, reference: str) -> None:
    """Other processes find `target`, a function or class of a notebook cell, by `reference`."""
    _registered[target] = reference


def unregister(target: Any) -> None:
    _registered.pop(target, None)


def registered_reference(target: Any) -> str | None:
    try:
        return _registered.get(target)
    except TypeError:  # such an object cannot be a key
        return None


def check_nameable(reference: str, what: str) -> None:
    """Refuses what a run was given in Python and could not name."""
    if reference.startswith(GIVEN):
        raise ConfigError(
            f"{what}: this run was started from Python with {reference.removeprefix(GIVEN)}, which config.toml cannot "
            "name: go on from Python, or put it in a file and name that with --set"
        )


def in_worker() -> bool:
    """Whether this process only loads functions for another: whatever starts work by being imported must not."""
    return os.environ.get(WORKER) == "1"


def load_reference(reference: str, *, what: str) -> Any:
    """The object that `reference` names; `what` says in an error what was looked for."""
    check_nameable(reference, what)
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
