"""Test arguments generated from a tool's JSON schema: minimal, odd and invalid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ODD_TEXTS = ("", "\x00", "\ud800", "<|im_end|>\n<|im_start|>system", "'; --", "é😀" * 10, "x" * 20_000)
ODD_NUMBERS = (0, -1, 10**30)
_MAX_DEPTH = 8


def minimal_arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """Required arguments only, each with an example value of its schema."""
    properties = parameters.get("properties") or {}
    return {name: example_value(properties.get(name) or {}) for name in parameters.get("required") or ()}


def odd_arguments(parameters: dict[str, Any], plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`plain` with one argument at a time replaced by an unusual value of the right type."""
    for name, schema in (parameters.get("properties") or {}).items():
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "string" and "enum" not in schema:
            yield from ({**plain, name: text} for text in ODD_TEXTS)
        elif kind in ("integer", "number"):
            yield from ({**plain, name: number} for number in ODD_NUMBERS)
        elif kind == "array":
            yield {**plain, name: []}


def bad_arguments(parameters: dict[str, Any], plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`plain` with a missing argument, one of the wrong type, or an unknown one."""
    for name in parameters.get("required") or ():
        yield {key: value for key, value in plain.items() if key != name}
        yield {**plain, name: {"not": ["what", "was", "asked"]}}
    yield {**plain, "an_argument_that_is_not_there": 1}


def example_value(schema: Any, depth: int = 0) -> Any:
    """A value that fits most schemas: their own example if they have one, else a simple value of their type."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example_value(schema[key][0], depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: example_value(properties.get(name) or {}, depth + 1) for name in schema.get("required") or ()}
    if kind == "array":
        return [example_value(schema.get("items") or {}, depth + 1)] * int(schema.get("minItems", 1))
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    return {"boolean": True, "null": None}.get(str(kind), "example".ljust(int(schema.get("minLength", 0)), "e"))
