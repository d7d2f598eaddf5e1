"""Plain data as Python literals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

NamedContainers = Mapping[int, str]
"""`id` -> name of containers that are already bound: written as that name, so that they stay one object."""


def literal(value: Any, known: NamedContainers | None = None, depth: int = 0) -> str | None:
    """The value as a Python literal; None if it is not plain data."""
    if depth > 50:
        return None
    kind = type(value)
    if value is None or value is Ellipsis or kind in (bool, int, str, bytes):
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if known and id(value) in known:
        return known[id(value)]
    if kind in (list, tuple, set, frozenset):
        items = [literal(item, known, depth + 1) for item in value]
        return (
            None if any(item is None for item in items) else _collection_literal(kind, [item for item in items if item])
        )
    if kind is dict:
        pairs = [(literal(key, known, depth + 1), literal(item, known, depth + 1)) for key, item in value.items()]
        if any(key is None or item is None for key, item in pairs):
            return None
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    return None


def containers(value: Any, path: str) -> Iterator[tuple[int, str]]:
    """The `id` of each list, dict and set in plain data, and the expression that reaches it."""
    if isinstance(value, list | dict | set):
        yield id(value), path
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from containers(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from containers(item, f"{path}[{literal(key)}]")


def _collection_literal(kind: type, items: list[str]) -> str:
    if kind is list:
        return f"[{', '.join(items)}]"
    if kind is tuple:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return f"{kind.__name__}([{', '.join(sorted(items))}])"  # the same order in every process
