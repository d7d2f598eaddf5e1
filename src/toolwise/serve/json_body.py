"""JSON from strangers: how deep and how much is known before a single object is made of it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_JSON_TOKENS = 250_000
"""Strings, brackets and commas in one body. Text counts as one string however long it is."""
MAX_DEPTH = 64

# The closing quote may be missing: a match that fails would be tried again from every quote inside the string.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[][{},]', re.DOTALL)


def read_json(raw: bytes) -> Any:
    """The value of `raw`. Raises ValueError, in one line, for what is no JSON, too deep or too much."""
    _check_structure(raw)
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_read_float)
        if "\\u" in text:  # half a character, which only an escape can spell, cannot be tokenised
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as fault:
        raise ValueError((str(fault).splitlines() or [type(fault).__name__])[0]) from None
    return value


def _check_structure(raw: bytes) -> None:
    depth = 0
    for count, token in enumerate(_TOKEN.finditer(raw), 1):
        if count > MAX_JSON_TOKENS:
            raise ValueError(f"it has more than {MAX_JSON_TOKENS} strings, brackets and commas")
        first = raw[token.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested too deeply: {MAX_DEPTH} levels are allowed")
        elif first in b"]}":
            depth -= 1


def _read_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.20} is larger than numbers can be")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
