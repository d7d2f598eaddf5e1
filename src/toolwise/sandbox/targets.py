"""A reward's reference, looked at from the trainer without loading it: which files a worker must see, and no others."""

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
    """One function, as a worker is told of it."""

    reference: str
    read: tuple[str, ...]
    top: dict[str, Any] | None = None
    """The package of a dotted reference: name, origin, places."""


def resolve(reference: str) -> Target:
    """Raises a `WorkerFault` of kind import where there is nothing to load."""
    check_nameable(reference, "reward")
    place, colon, name = reference.rpartition(":")
    if not colon or reference.endswith(".py"):
        place, name = reference, ""
    suffix = f":{name}" if name else ""
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise WorkerFault("import", f"reward: there is no file {place!r}")
        return Target(f"{path}{suffix}", _with_siblings(path))
    return _resolve_module(current_module(place), suffix)


def _resolve_module(place: str, suffix: str) -> Target:
    top = place.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError) as fault:
        raise WorkerFault("import", f"reward: cannot find {place!r}: {fault}") from None
    if spec is None:
        raise WorkerFault("import", f"reward: there is no module {top!r}; or write path/to/file.py:name")
    places = [str(Path(p).resolve()) for p in spec.submodule_search_locations or ()]
    origin = str(Path(spec.origin).resolve()) if spec.has_location and spec.origin else None
    if origin is None and not places:
        return Target(f"{place}{suffix}", ())
    known = {"name": top, "origin": origin, "places": places or None}
    return Target(f"{place}{suffix}", tuple(places) or _with_siblings(Path(str(origin))), known)


def _with_siblings(path: Path) -> tuple[str, ...]:
    """A file and the modules beside it that it imports; nothing else of its folder."""
    if path.suffix != ".py" or within(str(path), library_folders()):
        return (str(path),)
    return (str(path), *map(str, imported_siblings(path)))


def reference_of(function: Callable[..., Any]) -> str:
    """How a worker finds a function object again."""
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
        raise RewardError(f"reward {what}: a sandbox loads a reward from its file; write it as a def at the top of one")
    module = getattr(function, "__module__", "") or ""
    found = Path(source).resolve()
    return f"{module}:{name}" if _is_importable(module, found) else f"{found}:{name}"


def _is_importable(module: str, source: Path) -> bool:
    """Whether a fresh interpreter finds `module` by its name: one may be known here by other ways."""
    if not module or module == "__main__":
        return False
    place = module.replace(".", "/")
    ways = [Path(folder, way) for folder in sys.path if folder for way in (f"{place}.py", f"{place}/__init__.py")]
    return any(way.resolve() == source for way in ways)


def library_folders() -> list[str]:
    """Where the interpreter and the packages installed for it lie; what else is on sys.path is not a worker's."""
    paths = sysconfig.get_paths()
    known = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")] + site.getsitepackages()
    if site.ENABLE_USER_SITE:
        known.append(site.getusersitepackages())
    roots = [Path(p).resolve() for p in (*known, f"{sys.base_prefix}/lib")]
    found = [p for p in sys.path if p and any(Path(p).resolve().is_relative_to(root) for root in roots)]
    return list(dict.fromkeys(found))


def package_folder() -> Path:
    """The folder of this package."""
    return Path(str(toolwise.__file__)).resolve().parent


def readable_folders() -> list[str]:
    """What every worker may read: packages, the libraries that they are linked with, and this package."""
    linked = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    return [*library_folders(), f"{sys.base_prefix}/lib", *linked, str(package_folder())]


def within(path: str, folders: Sequence[str]) -> bool:
    return any(Path(path).resolve().is_relative_to(Path(folder).resolve()) for folder in folders)
