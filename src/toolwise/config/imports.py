"""`package.module:name` and `path/to/file.py:name` -> the Python object: how configuration files name code."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from toolwise.config.moved_modules import current_module
from toolwise.config.sibling_imports import siblings_of
from toolwise.errors import ConfigError, RewardError

WORKER_ENV_VAR = "TOOLWISE_WORKER"
"""Set in the environment of worker processes, which load other people's files again."""

GIVEN_IN_PYTHON = "given in Python: "
"""Begins what a run's config.toml says of a tool or a reward that it cannot name."""


class Registration(NamedTuple):
    """Where the copy of a notebook cell's function or class lies, and which version of it."""

    reference: str
    version: str


_registered: WeakKeyDictionary[Any, Registration] = WeakKeyDictionary()


def register(target: Any, reference: str) -> None:
    """Other processes find `target`, a function or class of a notebook cell, by `reference`."""
    _registered[target] = Registration(reference, file_version(reference.rpartition(":")[0]))


def unregister(target: Any) -> None:
    _registered.pop(target, None)


def registration_of(target: Any) -> Registration | None:
    try:
        return _registered.get(target)
    except TypeError:  # such an object cannot be a key
        return None


def registered_reference(target: Any) -> str | None:
    found = registration_of(target)
    return found.reference if found is not None else None


def file_version(file: str | Path) -> str:
    """Changes with the content of a file, so that nothing loaded from an older one is taken for it."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def check_nameable(reference: str, what: str) -> None:
    """Refuses what a run was given in Python and could not name."""
    if reference.startswith(GIVEN_IN_PYTHON):
        raise ConfigError(
            f"{what}: this run was started from Python with {reference.removeprefix(GIVEN_IN_PYTHON)}, which "
            f"config.toml cannot "
            "name: go on from Python, or put it in a file and name that with --set"
        )


def in_worker() -> bool:
    """Whether this process only loads functions for another: whatever starts work by being imported must not."""
    return os.environ.get(WORKER_ENV_VAR) == "1"


def load_reference(reference: str, *, what: str) -> Any:
    """The object that `reference` names; `what` says in an error what was looked for."""
    check_nameable(reference, what)
    module_ref, colon, name = reference.rpartition(":")
    if not colon or not module_ref or not name:
        raise ConfigError(f"{what}: {reference!r} names nothing; write package.module:name or path/to/file.py:name")
    module = load_module(module_ref, what=what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what}: {module_ref} has no {name!r}{did_you_mean(name, vars(module))}")
        found = getattr(found, part)
    return found


def load_module(module_ref: str, *, what: str) -> ModuleType:
    """A module by dotted name or by file."""
    try:
        return _load_file(module_ref, what) if module_ref.endswith(".py") else _import(module_ref)
    except (ConfigError, RewardError):
        raise
    except ModuleNotFoundError as fault:
        raise ConfigError(f"{what}: cannot import {module_ref!r} ({fault}); or write path/to/file.py:name") from fault
    except Exception as fault:  # whatever other people's code raises on import is theirs to read, in one line
        raise ConfigError(f"{what}: importing {module_ref!r} failed: {type(fault).__name__}: {fault}") from fault


def _import(name: str) -> ModuleType:
    return importlib.import_module(current_module(name))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class _Loader(SourceFileLoader):
    """Reads the source itself: bytecode in __pycache__ passes for that of any edit of the same second and size."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _load_file(source: str, what: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {source!r}")
    # Loaded once for each content of a path: two references into one file must see the same module state.
    key = hashlib.sha256(f"{path}\n{file_version(path)}".encode()).hexdigest()[:12]
    name = f"toolwise_file_{path.stem}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
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
