"""References to a tool's code (module, file, name) by which a worker process loads it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from toolwise.config.imports import file_version, load_module, registration_of
from toolwise.errors import ToolwiseError


@dataclass(frozen=True, slots=True)
class ModuleRef:
    """A module: the name that its own imports may need, and the file that identifies it."""

    module: str | None
    file: str
    version: str = ""
    """Version of the file: a process that loaded another version belongs to a different `ModuleRef`."""

    def __str__(self) -> str:
        return self.module or self.file

    def load(self) -> ModuleType:
        """Import the module. A script is not loaded as `__main__`, so its guarded code does not run."""
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
    """A function or a class: its module and its name there."""

    module_ref: ModuleRef
    name: str

    @classmethod
    def of(cls, target: Callable[..., Any]) -> ObjectRef:
        """The reference by which another process can load `target`; raises `ToolwiseError` if it cannot."""
        registered = registration_of(target)
        if registered is not None:
            file, _, name = registered.reference.rpartition(":")
            return cls(ModuleRef(None, file, registered.version), name)
        name = str(getattr(target, "__qualname__", ""))
        if inspect.ismethod(target):
            raise ToolwiseError("it is a method of an object in this process; write it as a top-level def in a file")
        if "<lambda>" in name:
            raise ToolwiseError("a lambda cannot be loaded by another process; write it as a top-level def in a file")
        if "<" in name:
            raise ToolwiseError("it is defined inside a function; move it to the top level of its file")
        module = str(getattr(target, "__module__", "") or "")
        try:
            source = inspect.getsourcefile(inspect.unwrap(target))
        except TypeError:
            source = None
        if not name or source is None or not source.endswith(".py") or not Path(source).is_file():
            raise ToolwiseError("it has no file that another process could load; write it as a top-level def in one")
        path = Path(source).resolve()
        if module == "__main__":
            if not has_main_guard(path):
                raise ToolwiseError(
                    f'loading {path.name} again would run it; put the code to run under `if __name__ == "__main__":`'
                )
            module = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None) or ""
        by_name = module and not module.startswith("toolwise_file_")
        return cls(ModuleRef(module if by_name else None, str(path), file_version(path)), name)

    def find(self, module: ModuleType) -> Any:
        return attrgetter(self.name)(module)


def has_main_guard(file: Path) -> bool:
    """Whether a script has an `if __name__ == "__main__":` block."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    tests = [node for statement in tree.body if isinstance(statement, ast.If) for node in ast.walk(statement.test)]
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in tests)
