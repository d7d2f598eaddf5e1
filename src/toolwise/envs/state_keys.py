"""Convert any object to JSON values and hash them, so that states of an environment can be compared."""

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
    """A hash of 16 characters, equal for equal `to_jsonable(value)`."""
    text = json.dumps(to_jsonable(value), ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_jsonable(value: Any) -> Any:
    """`value` as JSON values. Objects become their type and public attributes, sets are sorted, and cycles are cut.

    Nothing that could differ between equal states, such as an address or an order, remains.
    """
    return _JsonableConverter().to_jsonable(value, ())


class _JsonableConverter:
    def __init__(self) -> None:
        self.values = 0

    def to_jsonable(self, value: Any, ancestors: tuple[int, ...]) -> Any:
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
        if id(value) in ancestors:
            return "<itself>"
        if len(ancestors) >= MAX_DEPTH or self.values > MAX_VALUES:
            return "…"
        return self._convert_object(value, (*ancestors, id(value)))

    def _convert_object(self, value: Any, ancestors: tuple[int, ...]) -> Any:
        if callable(getattr(value, "tolist", None)):  # numpy arrays and scalars, without importing numpy
            return self.to_jsonable(value.tolist(), ancestors)
        if isinstance(value, Mapping):
            return self._table(value.items(), ancestors)
        if isinstance(value, Set):
            return sorted(
                (self.to_jsonable(item, ancestors) for item in value), key=lambda item: json.dumps(item, sort_keys=True)
            )
        if isinstance(value, list | tuple | deque):
            return [self.to_jsonable(item, ancestors) for item in value]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, Iterator) or callable(value) or isinstance(value, type):
            return f"<{kind}>"
        state = public_state(value)
        return {"": kind, **self._table(state.items(), ancestors)} if state else f"<{kind}>"

    def _table(self, items: Any, ancestors: tuple[int, ...]) -> dict[str, Any]:
        return {key if isinstance(key, str) else repr(key): self.to_jsonable(item, ancestors) for key, item in items}


def public_state(value: object) -> dict[str, Any]:
    """The attributes of `value` whose names do not start with an underscore, sorted by name."""
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)}
    else:
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = {name for slot in slots for name in ([slot] if isinstance(slot, str) else slot)}
    names |= set(getattr(value, "__dict__", ()))
    return {name: getattr(value, name) for name in sorted(names) if name[:1] != "_" and hasattr(value, name)}
