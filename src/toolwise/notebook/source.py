"""The text of a file that defines one function or class of a cell, and all that it refers to."""

from __future__ import annotations

import ast
import builtins
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

from toolwise.config.secret_names import find_secret
from toolwise.errors import ToolwiseError
from toolwise.notebook.comparison import check_equivalent
from toolwise.notebook.literals import containers, literal
from toolwise.notebook.names import attribute_chains, global_names
from toolwise.notebook.text import Cell, find_cells, find_class, find_function, find_statement
from toolwise.sandbox.targets import library_folders, package_folder

MAX_LITERAL_CHARS = 1_000_000
"""Characters that the source of one constant may have."""
HEADER = "# Collected by Toolwise from a notebook, the REPL or a script, so that other processes can load it.\n"
_FUTURE = 0x1000000  # CO_FUTURE_ANNOTATIONS
_TYPING = ("typing", "types", "typing_extensions", "collections.abc")


def unwrap_target(target: Any) -> Any:
    """The function or class beneath decorators; a tool made of a function is one too."""
    return inspect.unwrap(target)


def lacks_file(target: Any) -> bool:
    """Whether nothing on disk holds the definition of a function or a class."""
    found = unwrap_target(target)
    methods = [found] if isinstance(found, FunctionType) else _methods(found) if isinstance(found, type) else []
    if methods:
        return not Path(methods[0].__code__.co_filename).is_file()
    if not isinstance(found, type) or found.__module__ != "__main__":
        return False
    file = getattr(sys.modules["__main__"], "__file__", None)
    return file is None or find_class(found, [Cell.from_filename(file)]) is None


def collect_source(target: Any) -> str:
    """The text of a file that defines `target` under its own name; a `ToolwiseError` says why there is none."""
    found = unwrap_target(target)
    if not isinstance(found, FunctionType | type):
        raise ToolwiseError(f"{type(target).__name__} objects have no source; write a function or a class")
    collector = _Collector()
    collector.add(found.__name__, target, _namespace_of(found, {}), found.__name__)
    text = collector.text()
    secret = find_secret(text)
    if secret is not None:
        raise ToolwiseError(
            f"{found.__name__} holds {secret}, which looks like a secret and would be stored in the run's folder; "
            f"read it from os.environ inside {found.__name__}, or give it another name if it is none"
        )
    check_equivalent(text, collector.defined, found.__module__)
    return text


class _Collector:
    """One file under construction: names bound so far, imports, and definitions in the order they need each other."""

    def __init__(self) -> None:
        self._bound: dict[str, Any] = {}
        self._imports: dict[str, None] = {}
        self._parts: list[str] = []
        self._future = False
        self._containers: dict[int, str] = {}
        self.defined: dict[str, Any] = {}
        """What comes of the cells' own text, by name: it need not give the same again."""

    def text(self) -> str:
        future = ["from __future__ import annotations"] if self._future else []
        imports = "\n".join([*future, *sorted(self._imports)])
        return "\n\n\n".join(part for part in (HEADER + imports, *self._parts) if part).strip() + "\n"

    def add(self, name: str, value: Any, namespace: Mapping[str, Any], user: str) -> None:
        """Bind `name` to what `value` is; `user` is the function that needs it."""
        if name in self._bound:
            if not _is_same_value(self._bound[name], value):
                raise ToolwiseError(f"{user} uses two different things named {name!r}; rename one of them")
            return
        self._bound[name] = value
        line = self._import_line(name, value, namespace)
        if line is not None:
            self._imports[line] = None
        elif isinstance(unwrap_target(value), FunctionType | type):
            self.defined[name] = value
            self._define(name, value, namespace, user)
        else:
            self._parts.append(f"{name} = {self._constant(name, value, namespace, user)}")
            self._containers = dict(containers(value, name)) | self._containers

    def _define(self, name: str, value: Any, namespace: Mapping[str, Any], user: str) -> None:
        found = unwrap_target(value)
        own, space = found.__name__, _namespace_of(found, namespace)
        if "<locals>" in found.__qualname__ or (own == "<lambda>" and name == "<lambda>"):
            what = "is defined inside a function" if own != "<lambda>" else "is a lambda"
            raise ToolwiseError(f"{own} {what}, which no other process can load; write it as a def of its own")
        source = "" if own == "<lambda>" else self._definition(found, space, name)
        another = own != name and space.get(own) is not value
        if not source or (value is not found and (another or not source.startswith("@"))):
            # name = lambda …, or name = wrapper(function)
            before = f"{source}\n\n\n" if own == name else ""
            source, own = before + self._assignment(name, value, namespace), name
        elif own != name and not _is_same_value(self._bound.setdefault(own, value), value):
            raise ToolwiseError(f"{user} uses two different things named {own!r}; rename one of them")
        if isinstance(found, FunctionType):
            self._future |= bool(found.__code__.co_flags & _FUTURE)
        self._add_references(source, space, own)
        marks = _plain_attributes(found) if not source.startswith("@") else {}
        lines = [
            *([f"{name} = {own}"] if own != name else []),
            *(f"{name}.{key} = {text}" for key, text in marks.items()),
        ]
        self._parts.append("\n\n\n".join([source, *(["\n".join(lines)] if lines else [])]))

    def _add_references(self, source: str, namespace: Mapping[str, Any], user: str) -> None:
        """Bind all that a piece of source refers to."""
        for name in global_names(source):
            if name in namespace and not (name.startswith("__") and name.endswith("__")):
                self.add(name, namespace[name], namespace, user)
                if isinstance(namespace[name], ModuleType):
                    self._submodules(namespace[name], source, name)

    def _submodules(self, module: ModuleType, source: str, name: str) -> None:
        """`import a.b` binds `a` alone: name each submodule that the source reaches through it."""
        for chain in attribute_chains(source, name) if module.__name__ == name else ():
            if chain in sys.modules:
                self._imports[f"import {chain}"] = None

    def _import_line(self, name: str, value: Any, namespace: Mapping[str, Any]) -> str | None:
        if isinstance(value, ModuleType):
            if not _is_installed(value):
                raise ToolwiseError(
                    f"{name} is a module of your own ({getattr(value, '__file__', value.__name__)}), which a worker "
                    f"process cannot import: write `from {value.__name__} import …`, or put the function in a file"
                )
            return f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else "")
        for attribute in ("__name__", "_name"):
            home, own = getattr(value, "__module__", None), getattr(value, attribute, None)
            if isinstance(home, str) and isinstance(own, str) and _is_importable_as(home, own, value):
                return _import_from_line(home, own, name)
        if literal(value) is not None:
            return None
        for node in _import_nodes(namespace):  # objects that do not say where they come from
            for alias in node.names:
                if (alias.asname or alias.name) == name and _is_importable_as(node.module or "", alias.name, value):
                    return _import_from_line(node.module or "", alias.name, name)
        return None

    def _definition(self, found: FunctionType | type, namespace: Mapping[str, Any], name: str) -> str:
        cells = find_cells(_namespace_of(found, namespace))
        source = find_function(found) if isinstance(found, FunctionType) else find_class(found, cells)
        if source is None:
            raise ToolwiseError(
                f"the source of {name} cannot be found (a plain Python prompt keeps none before Python 3.13): "
                "put it in a file"
            )
        return source

    def _assignment(self, name: str, value: Any, namespace: Mapping[str, Any]) -> str:
        source = find_statement(name, find_cells(namespace))
        if source is None:
            what = "a lambda" if unwrap_target(value).__name__ == "<lambda>" else f"a {type(value).__name__}"
            raise ToolwiseError(f"{name} is {what} whose source cannot be found; write it as a def of its own")
        return source

    def _constant(self, name: str, value: Any, namespace: Mapping[str, Any], user: str) -> str:
        text = literal(value, self._containers)
        if text is not None and len(text) > MAX_LITERAL_CHARS:
            raise ToolwiseError(
                f"{user} uses {name}, a {type(value).__name__} of {len(text):,} characters, which is too big to copy; "
                f"read it from a file inside {user}"
            )
        if text is None and isinstance(value, re.Pattern):
            self._imports["import re"] = None
            text = f"re.compile({value.pattern!r}, {int(value.flags)})"
        if text is None and isinstance(value, PurePath):
            self._imports["import pathlib"] = None
            text = f"pathlib.{type(value).__name__}({str(value)!r})"
        if text is None and type(value) is logging.Logger:
            self._imports["import logging"] = None
            text = f"logging.getLogger({value.name!r})"
        if text is None and type(value).__module__ in _TYPING:
            source = find_statement(name, find_cells(namespace))
            if source is not None:
                self._add_references(source, namespace, user)
                self.defined[name] = value
                text = source.partition("=")[2].strip()
        if text is None:
            kind = type(value)
            said = (
                kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
            )
            raise ToolwiseError(
                f"{user} uses {name}, a {said}, which cannot be written to a file for another process; "
                f"make it inside {user}"
            )
        return text


def _namespace_of(found: FunctionType | type, default: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(found, FunctionType):
        return found.__globals__
    methods = _methods(found)
    if methods:
        return methods[0].__globals__
    module = sys.modules.get(found.__module__)
    return default or (vars(module) if module is not None else {})


def _plain_attributes(found: FunctionType | type) -> dict[str, str]:
    """Plain attributes that were set on a function, such as a reward's mode; a decorator in the source sets its own."""
    told = {key: literal(value) for key, value in vars(found).items()} if isinstance(found, FunctionType) else {}
    return {key: text for key, text in told.items() if text is not None}


def _is_same_value(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(type(one) is type(other) and one == other)
    except Exception:  # an array, say, of which == is another one
        return False


def _methods(found: type) -> list[FunctionType]:
    """Those that somebody wrote: a dataclass makes others."""
    functions = [unwrap_target(getattr(value, "__func__", value)) for value in vars(found).values()]
    own = [f for f in functions if isinstance(f, FunctionType) and f.__module__ == found.__module__]
    return [
        f for f in own if f.__qualname__.startswith(f"{found.__qualname__}.") and f.__code__.co_filename != "<string>"
    ]


def _import_nodes(namespace: Mapping[str, Any]) -> Iterator[ast.ImportFrom]:
    for cell in find_cells(namespace):
        for node in ast.walk(cell.tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                yield node


def _import_from_line(module: str, own: str, name: str) -> str:
    return f"from {module} import {own}" + (f" as {name}" if own != name else "")


def _is_importable_as(module: str, name: str, value: Any) -> bool:
    """Whether `from module import name` gives this very object in a fresh interpreter."""
    home = sys.modules.get(module)
    return home is not None and getattr(home, name, None) is value and _is_installed(home)


def _is_installed(module: ModuleType) -> bool:
    """Whether every interpreter here can import it: built in, of the standard library or of an installed package."""
    if module.__name__ == "__main__" or getattr(module, "__spec__", None) is None:
        return module is builtins
    places: list[Any] = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    files = [Path(str(place)).resolve() for place in places if place]
    folders = [*(Path(folder).resolve() for folder in library_folders()), package_folder()]
    return not files or any(file.is_relative_to(folder) for file in files for folder in folders)
