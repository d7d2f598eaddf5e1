"""Resolves a reward's reference in the trainer without importing it: exactly which files a worker must see."""

from __future__ import annotations

import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toolwise
from toolwise.config.imports import check_nameable, registered_reference
from toolwise.config.moved_modules import current_module
from toolwise.config.sibling_imports import imported_siblings
from toolwise.errors import RewardError
from toolwise.sandbox.faults import WorkerFault


@dataclass(frozen=True, slots=True)
class Target:
    """A function that a worker is to load."""

    reference: str
    read: tuple[str, ...]
    top: dict[str, Any] | None = None
    """The top package of a dotted reference: name, origin, search locations."""


def resolve(reference: str) -> Target:
    """Raises a `WorkerFault` of kind `import` if there is nothing to load."""
    check_nameable(reference, "reward")
    path_or_module, colon, name = reference.rpartition(":")
    if not colon or reference.endswith(".py"):
        path_or_module, name = reference, ""
    suffix = f":{name}" if name else ""
    if path_or_module.endswith(".py"):
        path = Path(path_or_module).expanduser().resolve()
        if not path.is_file():
            raise WorkerFault("import", f"reward: there is no file {path_or_module!r}")
        return Target(f"{path}{suffix}", _with_siblings(path))
    return _resolve_module(current_module(path_or_module), suffix)


def _resolve_module(module: str, suffix: str) -> Target:
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError) as fault:
        raise WorkerFault("import", f"reward: cannot find {module!r}: {fault}") from None
    if spec is None:
        raise WorkerFault(
            "import", f"reward: there is no module {top!r}; use an installed module, or write path/to/file.py:name"
        )
    search_paths = [str(Path(p).resolve()) for p in spec.submodule_search_locations or ()]
    origin = str(Path(spec.origin).resolve()) if spec.has_location and spec.origin else None
    if origin is None and not search_paths:
        return Target(f"{module}{suffix}", ())
    package = {"name": top, "origin": origin, "places": search_paths or None}
    return Target(f"{module}{suffix}", tuple(search_paths) or _with_siblings(Path(str(origin))), package)


def _with_siblings(path: Path) -> tuple[str, ...]:
    """A file and the sibling modules that it imports; nothing else from its folder."""
    if path.suffix != ".py" or within(str(path), library_folders()):
        return (str(path),)
    return (str(path), *map(str, imported_siblings(path)))


def reference_of(function: Callable[..., Any]) -> str:
    """The reference by which a worker can load a function object."""
    registered = registered_reference(inspect.unwrap(function))
    if registered is not None:
        return registered
    name = str(getattr(function, "__qualname__", ""))
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        source = None
    if not name or "<" in name or source is None or not Path(source).is_file():
        what = "a lambda" if "<lambda>" in name else name or type(function).__name__
        raise RewardError(
            f"reward {what}: a sandbox loads a reward from its file; define it with def at the top level of a module"
        )
    module = getattr(function, "__module__", "") or ""
    path = Path(source).resolve()
    return f"{module}:{name}" if _is_importable(module, path) else f"{path}:{name}"


def _is_importable(module: str, source: Path) -> bool:
    """Whether a fresh interpreter finds `module` by name: here it may have been loaded some other way."""
    if not module or module == "__main__":
        return False
    stem = module.replace(".", "/")
    candidates = [
        Path(folder, candidate) for folder in sys.path if folder for candidate in (f"{stem}.py", f"{stem}/__init__.py")
    ]
    return any(candidate.resolve() == source for candidate in candidates)


def library_folders() -> list[str]:
    """The sys.path folders of the interpreter and its installed packages; workers get no others."""
    paths = sysconfig.get_paths()
    site_folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")] + site.getsitepackages()
    if site.ENABLE_USER_SITE:
        site_folders.append(site.getusersitepackages())
    roots = [Path(p).resolve() for p in (*site_folders, f"{sys.base_prefix}/lib")]
    folders = [p for p in sys.path if p and any(Path(p).resolve().is_relative_to(root) for root in roots)]
    return list(dict.fromkeys(folders))


def package_folder() -> Path:
    return Path(str(toolwise.__file__)).resolve().parent


def readable_folders() -> list[str]:
    """What every worker may read: installed packages, the libraries they link to, and this package."""
    linked = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return [*library_folders(), f"{sys.base_prefix}/lib", *linked, str(package_folder())]


def within(path: str, folders: Sequence[str]) -> bool:
    return any(Path(path).resolve().is_relative_to(Path(folder).resolve()) for folder in folders)
