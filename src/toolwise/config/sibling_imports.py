"""Make `import helpers` work in a file that is loaded by its path, for modules in the same folder.

Each folder's modules get their own names in `sys.modules`, so that files in two folders that both have a `helpers.py`
do not see each other's; nothing is added to `sys.path`. The standard library and toolwise come first; a module beside
the file comes before an installed one, as it does for a script.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PREFIX = "toolwise_file_folder_"
_NEVER_SIBLINGS = frozenset({"toolwise", *sys.stdlib_module_names})
_MAX_SOURCE_BYTES = 4 << 20
"""Larger files are not searched for imports."""

ModulePath = tuple[str, ...]


class Siblings:
    """The modules of one folder, importable by the files in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = f"{PREFIX}{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        self.builtins = {**vars(builtins), "__import__": self._import}
        """The `__builtins__` of a module whose import statements should also find its siblings."""
        self._is_private = cache(self._find_private)
        root = ModuleType(self.package)
        root.__path__ = [str(folder)]
        sys.modules[self.package] = root

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self._is_private(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        qualified = f"{self.package}.{name}"
        if fromlist:
            return builtins.__import__(qualified, globals, locals, fromlist)
        importlib.import_module(qualified)
        return sys.modules[f"{self.package}.{top}"]

    def _find_private(self, top: str) -> bool:
        """Whether `top` is a module in the folder that an ordinary import would not find."""
        base = self.folder / top
        file = _file_of(base)
        if not top or top in _NEVER_SIBLINGS or not (file or base.is_dir()):
            return False
        spec = None
        with suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(top)
        if spec is None or file is None:  # a folder without __init__.py yields to any other module of that name
            return spec is None
        return spec.origin is None or Path(spec.origin).resolve() != file.resolve()

    def spec_of(self, name: str, parts: ModulePath) -> ModuleSpec | None:
        base = self.folder.joinpath(*parts)
        if (file := _file_of(base)) is not None:
            inner = [str(base)] if file.name == "__init__.py" else None
            loader = FileLoader(name, str(file), self)
            return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=inner)
        if not base.is_dir():
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(base)]
        return spec


class FileLoader(SourceFileLoader):
    """Loads a file that can import its siblings.

    Ignores bytecode in __pycache__, which stays valid for edits within the same second that keep the file size.
    """

    def __init__(self, name: str, path: str, siblings: Siblings) -> None:
        super().__init__(name, path)
        self._siblings = siblings

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._siblings.builtins
        super().exec_module(module)


class _Finder:
    """Finds modules under a folder's package name. Never lists a folder: a sandbox forbids that."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root, *parts = name.split(".")
        siblings = _siblings_by_package.get(root)
        return siblings.spec_of(name, tuple(parts)) if siblings is not None and parts else None


_siblings_by_package: dict[str, Siblings] = {}


def siblings_of(file: Path) -> Siblings:
    """The `Siblings` of the folder of `file`."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    siblings = next((known for known in _siblings_by_package.values() if known.folder == file.parent), None)
    if siblings is None:
        siblings = Siblings(file.parent)
        _siblings_by_package[siblings.package] = siblings
    return siblings


def _file_of(base: Path) -> Path | None:
    """The file of the module at `base`, a path without a suffix."""
    return next((path for path in (base / "__init__.py", base.parent / f"{base.name}.py") if path.is_file()), None)


def imported_siblings(file: Path) -> list[Path]:
    """The files beside `file` that it imports, directly or indirectly, found without running any of them.

    Dynamic imports (`importlib.import_module(name)`) are not found. Neither are symlinks that lead out of the folder or
    to anything but a .py file, because the sandbox lets its worker read every file returned here.
    """
    root = file.parent.resolve()
    packages: dict[Path, ModulePath] = {file: ()}
    pending = [file]
    while pending:
        source = pending.pop()
        for path, package in (m for parts in _imports(source, packages[source]) for m in _modules(file.parent, parts)):
            if path not in packages and _is_python_file_in(root, path):
                packages[path] = package
                pending.append(path)
    return [path for path in packages if path != file]


def _is_python_file_in(root: Path, path: Path) -> bool:
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # deleted meanwhile; a symlink loop
        return False
    return real.suffix == ".py" and real.is_relative_to(root)


def _imports(source: Path, package: ModulePath) -> Iterator[ModulePath]:
    """The dotted names that `source`, a module of `package`, may import, including names imported from a module."""
    try:
        if source.stat().st_size > _MAX_SOURCE_BYTES:
            return
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # loading the file reports the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _modules(root: Path, parts: ModulePath) -> Iterator[tuple[Path, ModulePath]]:
    """The files that importing `parts` loads, each with the package its relative imports start from."""
    if not parts or parts[0] in _NEVER_SIBLINGS:
        return
    for count in range(1, len(parts) + 1):
        file = _file_of(root.joinpath(*parts[:count]))
        if file is not None and file.name == "__init__.py":
            yield file, parts[:count]
        elif file is not None:
            yield file, parts[: count - 1]
            return
        elif not root.joinpath(*parts[:count]).is_dir():
            return
