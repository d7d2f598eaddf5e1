"""Resolve `package.module:name` and `path/to/file.py:name`, the references to Python code in configuration files."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from toolwise.config.moved_modules import current_module
from toolwise.config.sibling_imports import FileLoader, siblings_of
from toolwise.errors import ConfigError, RewardError

WORKER_ENV_VAR = "TOOLWISE_WORKER"
"""Set in the environment of worker processes, which load user files again."""

GIVEN_IN_PYTHON = "given in Python: "
"""Prefix in a run's config.toml of what was passed as a Python object and has no reference."""


class Registration(NamedTuple):
    """Reference to the saved copy of a notebook cell's function or class, and the version of that file."""

    reference: str
    version: str


_registered: WeakKeyDictionary[Any, Registration] = WeakKeyDictionary()


def register(target: Any, reference: str) -> None:
    """Let other processes find `target`, a function or class of a notebook cell, by `reference`."""
    _registered[target] = Registration(reference, file_version(reference.rpartition(":")[0]))


def unregister(target: Any) -> None:
    _registered.pop(target, None)


def registration_of(target: Any) -> Registration | None:
    try:
        return _registered.get(target)
    except TypeError:  # not hashable, or not weakly referenceable
        return None


def registered_reference(target: Any) -> str | None:
    registration = registration_of(target)
    return registration.reference if registration is not None else None


def file_version(file: str | Path) -> str:
    """Hash of a file's content, so that a module loaded from an older version is not reused."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def check_nameable(reference: str, what: str, otherwise: str = "") -> None:
    """Raise if `reference` stands for an object that was passed in Python and cannot be loaded by name.

    `otherwise` is added to the message.
    """
    if reference.startswith(GIVEN_IN_PYTHON):
        raise ConfigError(
            f"{what}: this run was started from Python with {reference.removeprefix(GIVEN_IN_PYTHON)}, which "
            "config.toml cannot name: resume it from Python, or put the code in a file and set its reference with --set"
            f"{otherwise}"
        )


def in_worker() -> bool:
    """Whether this is a worker process, which only loads functions: code must not start work on import there."""
    return os.environ.get(WORKER_ENV_VAR) == "1"


def load_reference(reference: str, *, what: str) -> Any:
    """Load the object that `reference` names; `what` describes it in error messages."""
    check_nameable(reference, what)
    module_ref, _, name = reference.rpartition(":")
    if not module_ref or not name:
        raise ConfigError(
            f"{what}: {reference!r} is not a reference; write package.module:name or path/to/file.py:name"
        )
    module = load_module(module_ref, what=what)
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise ConfigError(f"{what}: {module_ref} has no {name!r}{did_you_mean(name, vars(module))}") from None


def load_module(module_ref: str, *, what: str) -> ModuleType:
    """Load a module by dotted name or by file path."""
    try:
        is_file = module_ref.endswith(".py")
        return _load_file(module_ref, what) if is_file else importlib.import_module(current_module(module_ref))
    except (ConfigError, RewardError):
        raise
    except ModuleNotFoundError as fault:
        raise ConfigError(
            f"{what}: cannot import {module_ref!r} ({fault}); for a file, write path/to/file.py:name"
        ) from fault
    except Exception as fault:  # user code may raise anything on import: show it in one line
        raise ConfigError(f"{what}: importing {module_ref!r} failed: {type(fault).__name__}: {fault}") from fault


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_name(value: str, names: Iterable[str]) -> str:
    """`value`, if it is one of `names` or a reference; else a ValueError."""
    known = list(names)
    if value in known or ":" in value:
        return value
    hint = did_you_mean(value, known) or f"; use {', '.join(known)}, or path/to/file.py:name"
    raise ValueError(f"there is no {value!r}{hint}")


def _load_file(source: str, what: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{what}: file {source!r} does not exist")
    # Loaded once per path and content: two references into one file must share its module state.
    key = hashlib.sha256(f"{path}\n{file_version(path)}".encode()).hexdigest()[:12]
    name = f"toolwise_file_{path.stem}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    loader = FileLoader(name, str(path), siblings_of(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ConfigError(f"{what}: {source!r} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
