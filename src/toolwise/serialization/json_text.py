"""JSON as the standard has it, whatever is in a value: the one writer of every JSON file.

A number that is not finite becomes null. An integer that Python does not print, a key that is no text, an object of
another library or something nested too deeply is written as text that says so. Half a character is written as its
escape, so that every text can be encoded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any

MAX_DEPTH = 200
"""Levels of lists and tables; readers of JSON, Python's own among them, give up at about a thousand."""
INT_LIMIT = 1 << 4096
_MAX_SHOWN_CHARS = 10_000


def json_text(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """`value` as JSON text without NaN or Infinity; never raises."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=ascii_only, indent=indent)
    except (ValueError, TypeError, RecursionError):  # not finite, huge, circular, too deep, or of another library
        text = json.dumps(to_jsonable(value), allow_nan=False, ensure_ascii=ascii_only, indent=indent)
    return text if ascii_only else text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_line(value: Any) -> bytes:
    """One line of a JSONL file."""
    return f"{json_text(value)}\n".encode()


def to_jsonable(value: Any, depth: int = 0) -> Any:
    """`value` as what JSON has words for."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -INT_LIMIT < value < INT_LIMIT else f"an integer of {value.bit_length():,} bits"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth >= MAX_DEPTH:
        return f"a {type(value).__name__}, nested too deeply"
    if isinstance(value, Mapping):
        return {_key(key): to_jsonable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | Set):
        return [to_jsonable(item, depth + 1) for item in value]
    return _object_text(value)


def _key(key: Any) -> str:
    """As the standard library writes it, where it does: `true`, `null`, `1`."""
    found = to_jsonable(key) if key is None or isinstance(key, str | bool | int | float) else _object_text(key)
    return found if isinstance(found, str) else json.dumps(found)


def _object_text(value: Any) -> str:
    try:
        text = str(value)
    except Exception:  # other people's __str__
        return f"a {type(value).__name__}"
    return (
        text
        if len(text) <= _MAX_SHOWN_CHARS
        else f"{text[:_MAX_SHOWN_CHARS]} … cut, {len(text) - _MAX_SHOWN_CHARS:,} characters"
    )
