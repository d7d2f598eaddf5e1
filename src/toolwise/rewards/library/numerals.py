"""Parses numbers as people and models write them (thousands separators, currency signs, any minus) into `Decimal`."""

from __future__ import annotations

import math
import re
from collections import deque
from decimal import Decimal
from typing import Any

NUMBER = re.compile(
    r"""(?P<sign>(?<![\w)\]])[-+−])?   # a minus directly after a digit, word or bracket is subtraction
        [$€£]?
        (?P<late>(?<=[$€£])[-+−])?
        (?P<body>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
        (?P<exponent>[eE][-+]?[0-9]{1,4}(?![\w]))?""",
    re.VERBOSE,
)


def match_to_decimal(match: re.Match[str]) -> Decimal:
    """The number in a match of `NUMBER`."""
    sign = match["sign"] or match["late"] or ""
    digits = match["body"].replace(",", "") + (match["exponent"] or "")
    return Decimal(("-" if sign in ("-", "−") else "") + digits)


def last_number(text: str) -> Decimal | None:
    """The last number in `text`."""
    last = deque(NUMBER.finditer(text), maxlen=1)
    return match_to_decimal(last[0]) if last else None


def parse_number(value: Any) -> Decimal | None:
    """`value` as a number, if it is one or a text with nothing but a number; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return Decimal(repr(value)) if math.isfinite(value) else None
    match = NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    return match_to_decimal(match) if match else None
