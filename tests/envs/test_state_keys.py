"""State keys: equal states have equal keys, different states have different keys."""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.envs.state_keys import MAX_VALUES, public_state, state_digest, to_jsonable

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.frozensets(st.integers()),
    max_leaves=20,
)


class Colour(Enum):
    RED = 1


@dataclass
class Folder:
    name: str
    inside: dict[str, Any] = field(default_factory=dict)
    parent: Folder | None = None
    _secret: int = 0


class Slotted:
    __slots__ = ("_hidden", "shown", "unset")

    def __init__(self) -> None:
        self.shown, self._hidden = 1, 2


@given(VALUES)
def test_whatever_it_is_json_can_hold_it_and_its_name_is_stable(value: Any) -> None:
    json.dumps(to_jsonable(value), allow_nan=False)
    assert state_digest(value) == state_digest(value)
    assert len(state_digest(value)) == 16


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_order_of_keys_does_not_matter(table: dict[str, int]) -> None:
    assert state_digest(table) == state_digest(dict(reversed(table.items())))


@given(st.lists(st.integers(), unique=True, min_size=2))
def test_order_of_items_does(items: list[int]) -> None:
    assert state_digest(items) != state_digest(items[::-1])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (Colour.RED, "Colour.RED"),
        (b"\x00\xff", "00ff"),
        ({3, 1, 2}, [1, 2, 3]),
        (deque([1, 2]), [1, 2]),
        ({1: "a", "1": "b"}, {"1": "b"}),
        (Decimal("0.10"), "0.10"),
        (float("nan"), "nan"),
        ((1, "a"), [1, "a"]),
    ],
)
def test_jsonable_values(value: Any, expected: Any) -> None:
    assert to_jsonable(value) == expected


def test_objects_are_their_type_and_public_attributes() -> None:
    one, other = Folder("a", _secret=1), Folder("a", _secret=2)
    assert state_digest(one) == state_digest(other)
    assert state_digest(one) != state_digest(Folder("b"))
    assert public_state(Slotted()) == {"shown": 1}


def test_what_refers_to_itself_ends() -> None:
    root = Folder("root")
    root.inside["child"] = Folder("child", parent=root)
    assert "<itself>" in json.dumps(to_jsonable(root))
    other = Folder("root")
    other.inside["child"] = Folder("child", parent=other)
    assert state_digest(root) == state_digest(other)


def test_no_address_and_nothing_consumed() -> None:
    numbers = iter([1, 2, 3])
    held = {"lock": threading.Lock(), "function": lambda: None, "numbers": numbers, "bare": object()}
    assert "0x" not in json.dumps(to_jsonable(held))
    assert next(numbers) == 1


def test_depth_and_size_are_bounded() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(json.dumps(to_jsonable(deep))) < 200
    assert to_jsonable([[0]] * (MAX_VALUES + 10))[-1] == "…"
