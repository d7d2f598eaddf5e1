"""Writes any value as standard JSON; every JSON file is written through this module. Reads text that may not be JSON.

Non-finite numbers become null. Integers too large for Python to print, keys that are not strings, foreign objects and
values nested too deeply become descriptive text. Lone surrogates are written as escapes, so that every string can be
encoded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any

from toolwise.untrusted.bounds import truncate_text

MAX_DEPTH = 200
"""Nesting limit of lists and objects; JSON readers, including Python's, give up at about a thousand levels."""
INT_LIMIT = 1 << 4096
_MAX_SHOWN_CHARS = 10_000


def json_text(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """`value` as JSON text without NaN or Infinity; never raises."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=ascii_only, indent=indent)
    except (ValueError, TypeError, RecursionError):  # not finite, huge, circular, too deep, or a foreign object
        text = json.dumps(to_jsonable(value), allow_nan=False, ensure_ascii=ascii_only, indent=indent)
    return text if ascii_only else text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_line(value: Any) -> bytes:
    """One line of a JSONL file."""
    return f"{json_text(value)}\n".encode()


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text; None if it is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def valid_text(text: str) -> str:
    """`text` with `?` for lone surrogates, so that it can be stored as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def to_jsonable(value: Any, depth: int = 0) -> Any:
    """Convert `value` to types that JSON supports."""
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
    """The key as `json.dumps` writes it, if it supports the type: `true`, `null`, `1`."""
    plain = to_jsonable(key) if key is None or isinstance(key, str | bool | int | float) else _object_text(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _object_text(value: Any) -> str:
    try:
        return truncate_text(str(value), _MAX_SHOWN_CHARS)
    except Exception:  # __str__ is user code
        return f"a {type(value).__name__}"
