"""Convert any object to JSON values and hash them, so that states of an environment can be compared."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from typing import Any
from uuid import UUID

MAX_DEPTH = 40
MAX_VALUES = 100_000
_STRING_TYPES = (Decimal, Fraction, PurePath, UUID, date, time, timedelta, complex)


def state_digest(value: Any) -> str:
    """A hash of 16 characters, equal for equal `to_jsonable(value)`."""
    return hashlib.sha256(json.dumps(to_jsonable(value), ensure_ascii=True, sort_keys=True).encode()).hexdigest()[:16]


def to_jsonable(value: Any) -> Any:
    """`value` as JSON values. Objects become their type and public attributes, sets are sorted, and cycles are cut.

    Nothing that could differ between equal states, such as an address or an order, remains.
    """
    return _convert(value, (), itertools.count(1))


def _convert(value: Any, ancestors: tuple[int, ...], counter: Iterator[int]) -> Any:
    converted = next(counter)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, _STRING_TYPES):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if id(value) in ancestors:
        return "<itself>"
    if len(ancestors) >= MAX_DEPTH or converted > MAX_VALUES:
        return "…"
    inner = partial(_convert, ancestors=(*ancestors, id(value)), counter=counter)
    if callable(getattr(value, "tolist", None)):  # numpy arrays and scalars, without importing numpy
        return inner(value.tolist())
    if isinstance(value, Mapping):
        return _convert_table(value, inner)
    if isinstance(value, Set):
        return sorted(map(inner, value), key=lambda item: json.dumps(item, sort_keys=True))
    if isinstance(value, list | tuple | deque):
        return [inner(item) for item in value]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Iterator | type) or callable(value) or not (state := public_state(value)):
        return f"<{kind}>"
    return {"": kind, **_convert_table(state, inner)}


def _convert_table(table: Mapping[Any, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    return {key if isinstance(key, str) else repr(key): convert(item) for key, item in table.items()}


def public_state(value: object) -> dict[str, Any]:
    """The attributes of `value` whose names do not start with an underscore, sorted by name."""
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)}
    else:
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = {name for slot in slots for name in ([slot] if isinstance(slot, str) else slot)}
    names |= set(getattr(value, "__dict__", ()))
    return {name: getattr(value, name) for name in sorted(names) if name[:1] != "_" and hasattr(value, name)}
