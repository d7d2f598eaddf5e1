"""Builds a source file that defines a function or class from a cell, and everything it refers to."""

from __future__ import annotations

import ast
import builtins
import inspect
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

from toolwise.config.secret_names import find_secret
from toolwise.errors import ToolwiseError
from toolwise.notebook.comparison import check_equivalent, containers, literal
from toolwise.notebook.text import (
    Cell,
    attribute_chains,
    find_cells,
    find_class,
    find_function,
    find_statement,
    global_names,
)
from toolwise.sandbox.targets import library_folders, package_folder

MAX_LITERAL_CHARS = 1_000_000
"""Maximum length of the source of one constant."""
HEADER = "# Collected by Toolwise from a notebook, the REPL or a script, so that other processes can load it.\n"
_FUTURE = 0x1000000  # CO_FUTURE_ANNOTATIONS
_TYPING = ("typing", "types", "typing_extensions", "collections.abc")


def unwrap_target(target: Any) -> Any:
    """The function or class beneath its decorators; a function tool is such a wrapper too."""
    return inspect.unwrap(target)


def lacks_file(target: Any) -> bool:
    """Whether a function or class is defined in no file on disk."""
    inner = unwrap_target(target)
    methods = [inner] if isinstance(inner, FunctionType) else _methods(inner) if isinstance(inner, type) else []
    if methods:
        return not Path(methods[0].__code__.co_filename).is_file()
    if not isinstance(inner, type) or inner.__module__ != "__main__":
        return False
    file = getattr(sys.modules["__main__"], "__file__", None)
    return file is None or find_class(inner, [Cell.from_filename(file)]) is None


def collect_source(target: Any) -> str:
    """The text of a file that defines `target` under its own name; a `ToolwiseError` says why that is impossible."""
    inner = unwrap_target(target)
    if not isinstance(inner, FunctionType | type):
        raise ToolwiseError(f"{type(target).__name__} objects have no source; write a function or a class")
    collector = _Collector()
    collector.add(inner.__name__, target, _namespace_of(inner, {}), inner.__name__)
    text = collector.text()
    secret = find_secret(text)
    if secret is not None:
        raise ToolwiseError(
            f"{inner.__name__} holds {secret}, which looks like a secret and would be stored in the run's folder; "
            f"read it from os.environ inside {inner.__name__}, or rename it if it is not a secret"
        )
    check_equivalent(text, collector.defined, inner.__module__)
    return text


class _Collector:
    """A file under construction: names bound so far, imports, and definitions in dependency order."""

    def __init__(self) -> None:
        self._bound: dict[str, Any] = {}
        self._imports: dict[str, None] = {}
        self._parts: list[str] = []
        self._future = False
        self._containers: dict[int, str] = {}
        self.defined: dict[str, Any] = {}
        """name -> object defined from cell text; executing the text again may give something else, so it is checked."""

    def text(self) -> str:
        imports = "\n".join(["from __future__ import annotations"] * self._future + sorted(self._imports))
        return "\n\n\n".join(part for part in (HEADER + imports, *self._parts) if part).strip() + "\n"

    def add(self, name: str, value: Any, namespace: Mapping[str, Any], user: str) -> None:
        """Bind `name` to `value`; `user` is the function that needs it, for error messages."""
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
        inner = unwrap_target(value)
        own_name, inner_namespace = inner.__name__, _namespace_of(inner, namespace)
        if "<locals>" in inner.__qualname__ or (own_name == "<lambda>" and name == "<lambda>"):
            what = "is defined inside a function" if own_name != "<lambda>" else "is a lambda"
            raise ToolwiseError(f"{own_name} {what}, so no other process can load it; write it as a top-level def")
        source = "" if own_name == "<lambda>" else self._definition(inner, inner_namespace, name)
        renamed = own_name != name and inner_namespace.get(own_name) is not value
        if not source or (value is not inner and (renamed or not source.startswith("@"))):
            # name = lambda …, or name = wrapper(function)
            prefix = f"{source}\n\n\n" if own_name == name else ""
            source, own_name = prefix + self._assignment(name, value, namespace), name
        elif own_name != name and not _is_same_value(self._bound.setdefault(own_name, value), value):
            raise ToolwiseError(f"{user} uses two different things named {own_name!r}; rename one of them")
        if isinstance(inner, FunctionType):
            self._future |= bool(inner.__code__.co_flags & _FUTURE)
        self._add_references(source, inner_namespace, own_name)
        # Plain attributes, such as a reward's mode; a decorator in the source sets them again itself.
        decorated = source.startswith("@") or not isinstance(inner, FunctionType)
        attributes = {key: literal(value) for key, value in vars(inner).items() if not decorated}
        lines = [
            *([f"{name} = {own_name}"] if own_name != name else []),
            *(f"{name}.{key} = {text}" for key, text in attributes.items() if text is not None),
        ]
        self._parts.append("\n\n\n".join([source, *(["\n".join(lines)] if lines else [])]))

    def _add_references(self, source: str, namespace: Mapping[str, Any], user: str) -> None:
        """Bind every name that a piece of source refers to."""
        for name in global_names(source):
            special = name.startswith("__") and name.endswith("__")
            if name in namespace and not special and not _is_wrapped_builtin(name, namespace[name]):
                self.add(name, namespace[name], namespace, user)
                if isinstance(namespace[name], ModuleType) and namespace[name].__name__ == name:
                    # `import a.b` binds only `a`: import each submodule that the source reaches through it.
                    chains = attribute_chains(source, name)
                    self._imports |= {f"import {chain}": None for chain in chains if chain in sys.modules}

    def _import_line(self, name: str, value: Any, namespace: Mapping[str, Any]) -> str | None:
        if isinstance(value, ModuleType):
            if not _is_installed(value):
                raise ToolwiseError(
                    f"{name} is a module of your own ({getattr(value, '__file__', value.__name__)}), which a worker "
                    f"process cannot import: write `from {value.__name__} import …`, or put the function in a file"
                )
            return f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else "")
        for attribute in ("__name__", "_name"):
            module, own_name = getattr(value, "__module__", None), getattr(value, attribute, None)
            if isinstance(module, str) and isinstance(own_name, str) and _is_importable_as(module, own_name, value):
                return _import_from_line(module, own_name, name)
        if literal(value) is not None:
            return None
        imports = [
            node
            for cell in find_cells(namespace)
            for node in ast.walk(cell.tree)
            if isinstance(node, ast.ImportFrom) and not node.level
        ]
        for module, alias in ((node.module or "", alias) for node in imports for alias in node.names):
            # Objects without a `__module__`.
            if (alias.asname or alias.name) == name and _is_importable_as(module, alias.name, value):
                return _import_from_line(module, alias.name, name)
        return None

    def _definition(self, target: FunctionType | type, namespace: Mapping[str, Any], name: str) -> str:
        cells = find_cells(_namespace_of(target, namespace))
        source = find_function(target) if isinstance(target, FunctionType) else find_class(target, cells)
        if source is None:
            raise ToolwiseError(
                f"the source of {name} cannot be found (the plain Python prompt keeps none before Python 3.13): "
                "put it in a file"
            )
        return source

    def _assignment(self, name: str, value: Any, namespace: Mapping[str, Any]) -> str:
        source = find_statement(name, find_cells(namespace))
        if source is None:
            what = "a lambda" if unwrap_target(value).__name__ == "<lambda>" else f"a {type(value).__name__}"
            raise ToolwiseError(f"{name} is {what} whose source cannot be found; write it as a def")
        return source

    def _constant(self, name: str, value: Any, namespace: Mapping[str, Any], user: str) -> str:
        text = literal(value, self._containers)
        if text is not None and len(text) > MAX_LITERAL_CHARS:
            raise ToolwiseError(
                f"{user} uses {name}, a {type(value).__name__} of {len(text):,} characters, which is too big to copy; "
                f"read it from a file inside {user}"
            )
        if text is None and (text := _constructor_call(value)) is not None:
            self._imports[f"import {text.partition('.')[0]}"] = None
        if text is None and type(value).__module__ in _TYPING:
            source = find_statement(name, find_cells(namespace))
            if source is not None:
                self._add_references(source, namespace, user)
                self.defined[name] = value
                text = source.partition("=")[2].strip()
        if text is None:
            kind = type(value)
            type_name = (
                kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
            )
            raise ToolwiseError(
                f"{user} uses {name}, a {type_name}, which cannot be written to a file for another process; "
                f"create it inside {user}"
            )
        return text


def _constructor_call(value: Any) -> str | None:
    """An expression, of one imported module, that creates an object equal to `value`; None for other types."""
    if isinstance(value, re.Pattern):
        return f"re.compile({value.pattern!r}, {int(value.flags)})"
    if isinstance(value, PurePath):
        return f"pathlib.{type(value).__name__}({str(value)!r})"
    return f"logging.getLogger({value.name!r})" if type(value) is logging.Logger else None


def _namespace_of(target: FunctionType | type, default: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(target, FunctionType):
        return target.__globals__
    methods = _methods(target)
    if methods:
        return methods[0].__globals__
    module = sys.modules.get(target.__module__)
    return default or (vars(module) if module is not None else {})


def _is_same_value(first: Any, second: Any) -> bool:
    try:
        return first is second or bool(type(first) is type(second) and first == second)
    except Exception:  # for example an array, whose == gives an array
        return False


def _methods(cls: type) -> list[FunctionType]:
    """Methods written in source; a dataclass generates others."""
    functions = [unwrap_target(getattr(value, "__func__", value)) for value in vars(cls).values()]
    return [
        f
        for f in functions
        if isinstance(f, FunctionType)
        and f.__module__ == cls.__module__
        and f.__qualname__.startswith(f"{cls.__qualname__}.")
        and f.__code__.co_filename != "<string>"
    ]


def _import_from_line(module: str, attribute: str, name: str) -> str:
    return f"from {module} import {attribute}" + (f" as {name}" if attribute != name else "")


def _is_importable_as(module: str, name: str, value: Any) -> bool:
    """Whether `from module import name` gives this object in a fresh interpreter."""
    loaded = sys.modules.get(module)
    return loaded is not None and getattr(loaded, name, None) is value and _is_installed(loaded)


def _is_wrapped_builtin(name: str, value: Any) -> bool:
    """Whether `value` is a wrapper of the builtin `name`, as IPython's `open` is."""
    return name in vars(builtins) and getattr(value, "__wrapped__", None) is vars(builtins)[name]


def _is_installed(module: ModuleType) -> bool:
    """Whether any interpreter here can import it: built in, or part of the standard library or an installed package."""
    if module.__name__ == "__main__" or getattr(module, "__spec__", None) is None:
        return module is builtins
    locations: list[Any] = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    files = [Path(str(location)).resolve() for location in locations if location]
    folders = [*(Path(folder).resolve() for folder in library_folders()), package_folder()]
    return not files or any(file.is_relative_to(folder) for file in files for folder in folders)
