"""Any object -> a plain value and a short name for it: what makes two states of a world comparable."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

MAX_DEPTH = 40
MAX_VALUES = 100_000
_STRING_TYPES = (Decimal, Fraction, PurePath, UUID, date, time, timedelta, complex)


def state_digest(value: Any) -> str:
    """The same 16 characters wherever `to_jsonable(value)` is the same."""
    text = json.dumps(to_jsonable(value), ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_jsonable(value: Any) -> Any:
    """`value` as JSON can hold it. Objects are their type and public attributes, sets are sorted, what refers to
    itself is cut there, and nothing that could differ between two equal worlds (an address, an order) is left in."""
    return _JsonableConverter().to_jsonable(value, ())


class _JsonableConverter:
    def __init__(self) -> None:
        self.values = 0

    def to_jsonable(self, value: Any, above: tuple[int, ...]) -> Any:
        self.values += 1
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
        if id(value) in above:
            return "<itself>"
        if len(above) >= MAX_DEPTH or self.values > MAX_VALUES:
            return "…"
        return self._convert_object(value, (*above, id(value)))

    def _convert_object(self, value: Any, above: tuple[int, ...]) -> Any:
        if callable(getattr(value, "tolist", None)):  # numpy's arrays and numbers, without importing numpy
            return self.to_jsonable(value.tolist(), above)
        if isinstance(value, Mapping):
            return self._table(value.items(), above)
        if isinstance(value, Set):
            return sorted(
                (self.to_jsonable(item, above) for item in value), key=lambda item: json.dumps(item, sort_keys=True)
            )
        if isinstance(value, list | tuple | deque):
            return [self.to_jsonable(item, above) for item in value]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, Iterator) or callable(value) or isinstance(value, type):
            return f"<{kind}>"
        state = public_state(value)
        return {"": kind, **self._table(state.items(), above)} if state else f"<{kind}>"

    def _table(self, items: Any, above: tuple[int, ...]) -> dict[str, Any]:
        return {key if isinstance(key, str) else repr(key): self.to_jsonable(item, above) for key, item in items}


def public_state(value: object) -> dict[str, Any]:
    """The attributes of `value` whose names do not begin with an underscore, in the order of their names."""
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)}
    else:
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = {name for given in slots for name in ([given] if isinstance(given, str) else given)}
    names |= set(getattr(value, "__dict__", ()))
    return {name: getattr(value, name) for name in sorted(names) if name[:1] != "_" and hasattr(value, name)}
