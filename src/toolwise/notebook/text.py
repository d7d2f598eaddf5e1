"""Finds the text of notebook cells, single definitions in it, and the names that they take from their module."""

from __future__ import annotations

import ast
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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

    def classes(self, name: str) -> list[ast.ClassDef]:
        return [node for node in self.definitions() if isinstance(node, ast.ClassDef) and node.name == name]

    def extract(self, node: ast.stmt) -> str:
        return textwrap.dedent("".join(self.lines[_first_line(node) - 1 : node.end_lineno])).rstrip()


def _first_line(node: ast.stmt) -> int:
    return int(min(part.lineno for part in (node, *getattr(node, "decorator_list", []))))


def find_function(function: FunctionType) -> str | None:
    """The `def` of a function, with decorators."""
    code = function.__code__
    cell = Cell.from_filename(code.co_filename)
    for node in cell.definitions():
        if not isinstance(node, ast.ClassDef) and (node.name, _first_line(node)) == (code.co_name, code.co_firstlineno):
            return cell.extract(node)
    try:  # some REPLs store their input where only `inspect` finds it
        source = textwrap.dedent(inspect.getsource(function)).rstrip()
        [statement] = ast.parse(source).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    return source if isinstance(statement, Definition) and statement.name == code.co_name else None


def find_class(cls: type, cells: Sequence[Cell]) -> str | None:
    """The `class` statement of a class: where its methods were compiled, else its latest definition in `cells`."""
    for value in vars(cls).values():
        method = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)) or value)
        if isinstance(method, FunctionType) and method.__qualname__.startswith(f"{cls.__qualname__}."):
            cell, line = Cell.from_filename(method.__code__.co_filename), method.__code__.co_firstlineno
            for node in cell.classes(cls.__name__):
                if node.lineno <= line <= (node.end_lineno or node.lineno):
                    return cell.extract(node)
    return next((cell.extract(node) for cell in cells for node in cell.classes(cls.__name__)), None)


def find_statement(name: str, cells: Sequence[Cell]) -> str | None:
    """The latest top-level `name = …` in the cells."""
    for cell in cells:
        for node in reversed(cell.tree.body):
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
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


def global_names(source: str) -> list[str]:
    """Global names that `source` (a definition or a statement) refers to, including those in quoted annotations."""
    names = set(_table_names(symtable.symtable(source, "<cell>", "exec")))
    for annotation in _quoted_annotations(ast.parse(source)):
        names |= {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    return sorted(names)


def _table_names(table: symtable.SymbolTable) -> Iterator[str]:
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if (top and symbol.is_referenced()) or (not top and symbol.is_global()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _table_names(inner)


def _quoted_annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        for annotation in filter(None, [getattr(node, "annotation", None), getattr(node, "returns", None)]):
            for part in _without_literals(annotation):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    with suppress(SyntaxError):  # free text, as in Annotated[int, "metres each"]
                        yield ast.parse(part.value, mode="eval").body


def _without_literals(node: ast.AST) -> Iterator[ast.AST]:
    """The node and its descendants, except inside `Literal[…]`."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
        return
    yield node
    for inner in ast.iter_child_nodes(node):
        yield from _without_literals(inner)


def attribute_chains(source: str, name: str) -> list[str]:
    """Every attribute access that starts at `name`, with its prefixes: `a.b` and `a.b.c` for `a.b.c`."""
    chains: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id == name:
            chains |= dict.fromkeys(".".join([name, *parts[: count + 1]]) for count in range(len(parts)))
    return list(chains)
