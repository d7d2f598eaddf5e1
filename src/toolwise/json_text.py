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

DEEPEST = 200
"""Levels of lists and tables; readers of JSON, Python's own among them, give up at about a thousand."""
LARGEST_INT = 1 << 4096
_LONGEST_SHOWN = 10_000


def json_text(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """`value` as JSON text without NaN or Infinity; never raises."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=ascii_only, indent=indent)
    except (ValueError, TypeError, RecursionError):  # not finite, huge, circular, too deep, or of another library
        text = json.dumps(plain(value), allow_nan=False, ensure_ascii=ascii_only, indent=indent)
    return text if ascii_only else text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_line(value: Any) -> bytes:
    """One line of a JSONL file."""
    return f"{json_text(value)}\n".encode()


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as what JSON has words for."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -LARGEST_INT < value < LARGEST_INT else f"an integer of {value.bit_length():,} bits"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth >= DEEPEST:
        return f"a {type(value).__name__}, nested too deeply"
    if isinstance(value, Mapping):
        return {_key(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | Set):
        return [plain(item, depth + 1) for item in value]
    return _shown(value)


def _key(key: Any) -> str:
    """As the standard library writes it, where it does: `true`, `null`, `1`."""
    found = plain(key) if key is None or isinstance(key, str | bool | int | float) else _shown(key)
    return found if isinstance(found, str) else json.dumps(found)


def _shown(value: Any) -> str:
    try:
        text = str(value)
    except Exception:  # other people's __str__
        return f"a {type(value).__name__}"
    return (
        text
        if len(text) <= _LONGEST_SHOWN
        else f"{text[:_LONGEST_SHOWN]} … cut, {len(text) - _LONGEST_SHOWN:,} characters"
    )
