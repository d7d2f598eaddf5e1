"""Reads JSON bodies: their depth and size are checked before any object is created."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_JSON_TOKENS = 250_000
"""Strings, brackets and commas per body. A string counts as one, whatever its length."""
MAX_DEPTH = 64

# The closing quote is optional: a failed match would be retried from every quote inside the string.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[][{},]', re.DOTALL)


def read_json(raw: bytes) -> Any:
    """Parse `raw`. Raises a one-line ValueError if it is not JSON, too deep or too large."""
    _check_structure(raw)
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_read_float)
        if "\\u" in text:  # a lone surrogate, possible only as an escape, cannot be tokenised
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as fault:
        raise ValueError((str(fault).splitlines() or [type(fault).__name__])[0]) from None
    return value


def _check_structure(raw: bytes) -> None:
    depth = 0
    for count, token in enumerate(_TOKEN.finditer(raw), 1):
        if count > MAX_JSON_TOKENS:
            raise ValueError(f"more than {MAX_JSON_TOKENS} strings, brackets and commas")
        first = raw[token.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"nested too deeply: at most {MAX_DEPTH} levels are allowed")
        elif first in b"]}":
            depth -= 1


def _read_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.20} is too large for a number")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
