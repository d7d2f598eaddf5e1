"""Finds the text of notebook cells and extracts single definitions from it."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Cell:
    """One compiled piece of source: a cell, a REPL input, a file."""

    lines: tuple[str, ...]
    tree: ast.Module

    @classmethod
    def from_text(cls, text: str) -> Cell:
        try:
            return cls(tuple(text.splitlines(keepends=True)), ast.parse(text))
        except (SyntaxError, ValueError):  # such as an IPython magic
            return cls((), ast.Module([], []))

    @classmethod
    def from_filename(cls, filename: str) -> Cell:
        """Look up the filename it was compiled under: IPython and newer REPLs put the text into `linecache`."""
        return cls.from_text("".join(linecache.getlines(filename)))

    def definitions(self) -> Iterator[Definition]:
        """Top-level functions and classes, including those under an `if` or a `try`."""
        todo: list[ast.AST] = [*self.tree.body]
        while todo:
            node = todo.pop(0)
            if isinstance(node, Definition):
                yield node
            elif isinstance(node, ast.stmt | ast.ExceptHandler):
                todo += [*ast.iter_child_nodes(node)]

    def extract(self, node: ast.stmt) -> str:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        return textwrap.dedent("".join(self.lines[first - 1 : node.end_lineno])).rstrip()


def find_function(function: FunctionType) -> str | None:
    """The `def` of a function, with decorators."""
    cell = Cell.from_filename(function.__code__.co_filename)
    for node in cell.definitions():
        if not isinstance(node, ast.ClassDef) and node.name == function.__code__.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == function.__code__.co_firstlineno:
                return cell.extract(node)
    try:  # some REPLs store their input where only `inspect` finds it
        source = textwrap.dedent(inspect.getsource(function)).rstrip()
        [statement] = ast.parse(source).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    return source if isinstance(statement, Definition) and statement.name == function.__code__.co_name else None


def find_class(cls: type, cells: Sequence[Cell]) -> str | None:
    """The `class` statement of a class: where its methods were compiled, else its latest definition in `cells`."""
    for value in vars(cls).values():
        method = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)) or value)
        if isinstance(method, FunctionType) and method.__qualname__.startswith(f"{cls.__qualname__}."):
            cell, line = Cell.from_filename(method.__code__.co_filename), method.__code__.co_firstlineno
            for node in cell.definitions():
                within = node.lineno <= line <= (node.end_lineno or node.lineno)
                if isinstance(node, ast.ClassDef) and node.name == cls.__name__ and within:
                    return cell.extract(node)
    for cell in cells:
        for node in cell.definitions():
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                return cell.extract(node)
    return None


def find_statement(name: str, cells: Sequence[Cell]) -> str | None:
    """The latest top-level `name = …` in the cells."""
    for cell in cells:
        for node in reversed(cell.tree.body):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                [target] = node.targets
                if isinstance(target, ast.Name) and target.id == name:
                    return cell.extract(node)
    return None


def find_cells(namespace: Mapping[str, Any]) -> list[Cell]:
    """All cells that may have bound names in `namespace`, latest first."""
    history = namespace.get("_ih")  # IPython's input history, in order of execution
    if isinstance(history, list) and history:
        return [Cell.from_text(text) for text in reversed(history) if isinstance(text, str) and text]
    filenames = [name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None]
    file = getattr(sys.modules.get(str(namespace.get("__name__"))), "__file__", None)
    return [Cell.from_filename(name) for name in (*reversed(filenames), *([file] if file else []))]
