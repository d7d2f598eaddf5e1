"""Where a tool's code lies, so that another process can load it again; between a tool and the worker that runs it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from toolwise.config.imports import file_version, load_module, registration_of
from toolwise.errors import ToolwiseError


@dataclass(frozen=True, slots=True)
class ModuleRef:
    """A module, by the name that its own imports may need and by the file that decides which one is meant."""

    module: str | None
    file: str
    version: str = ""
    """Of the file: a process that loaded another version is not of this place."""

    def __str__(self) -> str:
        return self.module or self.file

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def load(self) -> ModuleType:
        """The module. A script is loaded under another name than `__main__`: what it guards does not run."""
        if self.module is not None and _file_of(self.module) == self.file:
            return importlib.import_module(self.module)
        return load_module(self.file, what="tool")


def _file_of(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return str(Path(spec.origin).resolve()) if spec is not None and spec.origin else None


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A function or a class by its place and its name there."""

    module_ref: ModuleRef
    name: str

    @classmethod
    def of(cls, target: Callable[..., Any]) -> ObjectRef:
        """How another process finds `target` again; raises a `ToolwiseError` that says why it cannot."""
        registered = registration_of(target)
        if registered is not None:
            file, _, name = registered.reference.rpartition(":")
            return cls(ModuleRef(None, file, registered.version), name)
        name = str(getattr(target, "__qualname__", ""))
        if inspect.ismethod(target):
            raise ToolwiseError("it belongs to an object that lives here; write it as a def at the top of a file")
        if "<lambda>" in name:
            raise ToolwiseError("a lambda cannot be loaded by another process; write it as a def at the top of a file")
        if "<" in name:
            raise ToolwiseError("it is defined inside a function; move it to the top of its file")
        module = str(getattr(target, "__module__", "") or "")
        try:
            source = inspect.getsourcefile(inspect.unwrap(target))
        except TypeError:
            source = None
        if not name or source is None or not source.endswith(".py") or not Path(source).is_file():
            raise ToolwiseError("it has no file that another process could load; write it as a def at the top of one")
        found = Path(source).resolve()
        if module == "__main__":
            if not has_main_guard(found):
                raise ToolwiseError(
                    f'loading {found.name} again would run it; put what it runs under `if __name__ == "__main__":`'
                )
            module = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None) or ""
        by_name = module and not module.startswith("toolwise_file_")
        return cls(ModuleRef(module if by_name else None, str(found), file_version(found)), name)

    def find(self, module: ModuleType) -> Any:
        found: Any = module
        for part in self.name.split("."):
            found = getattr(found, part)
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def has_main_guard(file: Path) -> bool:
    """Whether a script says what of it is not to run on import."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.If) and _is_main_test(node.test) for node in tree.body)


def _is_main_test(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
