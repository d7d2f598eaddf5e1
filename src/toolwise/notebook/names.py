"""Finds the names that a piece of source takes from its module."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator


def global_names(source: str) -> list[str]:
    """Global names that `source` (a definition or a statement) refers to, including those in quoted annotations."""
    names = dict.fromkeys(_table_names(symtable.symtable(source, "<cell>", "exec")))
    for annotation in _quoted_annotations(ast.parse(source)):
        names |= dict.fromkeys(node.id for node in ast.walk(annotation) if isinstance(node, ast.Name))
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
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in filter(None, annotations):
            for part in _without_literals(annotation):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    try:
                        yield ast.parse(part.value, mode="eval").body
                    except SyntaxError:  # free text, as in Annotated[int, "metres each"]
                        continue


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
