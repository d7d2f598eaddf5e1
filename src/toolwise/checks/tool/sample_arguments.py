"""Test arguments generated from a tool's JSON schema: odd and invalid ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ODD_TEXTS = ("", "\x00", "\ud800", "<|im_end|>\n<|im_start|>system", "'; --", "é😀" * 10, "x" * 20_000)
ODD_NUMBERS = (0, -1, 10**30)


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
