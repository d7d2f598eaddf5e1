"""Numbers as people and models write them: thousands with commas, currency signs, any minus. Exact, as decimals."""

from __future__ import annotations

import math
import re
from collections import deque
from decimal import Decimal
from typing import Any

NUMBER = re.compile(
    r"""(?P<sign>(?<![\w)\]])[-+−])?   # a minus right after a digit, a word or a bracket takes away
        [$€£]?
        (?P<late>(?<=[$€£])[-+−])?
        (?P<body>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
        (?P<exponent>[eE][-+]?[0-9]{1,4}(?![\w]))?""",
    re.VERBOSE,
)


def match_to_decimal(found: re.Match[str]) -> Decimal:
    """The number that `NUMBER` found."""
    sign = found["sign"] or found["late"] or ""
    digits = found["body"].replace(",", "") + (found["exponent"] or "")
    return Decimal(("-" if sign in ("-", "−") else "") + digits)


def last_number(text: str) -> Decimal | None:
    """The last number in `text`."""
    last = deque(NUMBER.finditer(text), maxlen=1)
    return match_to_decimal(last[0]) if last else None


def parse_number(value: Any) -> Decimal | None:
    """The one number that `value` is: a number, or a text that holds a number and nothing else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return Decimal(repr(value)) if math.isfinite(value) else None
    found = NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    return match_to_decimal(found) if found else None
