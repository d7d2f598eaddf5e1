"""Any value becomes standard JSON; valid JSON values stay unchanged."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from toolwise.serialization.json_text import json_line, json_text


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Wordy:
    def __str__(self) -> str:
        return "x" * 50_000


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (math.nan, None),
        ([math.inf, -math.inf, 1e308], [None, None, 1e308]),
        ({"a": {"b": (math.nan, {3})}}, {"a": {"b": [None, [3]]}}),
        ({math.nan: 1, True: 2, None: 3, 4: 5, (1,): 6}, {"null": 3, "true": 2, "4": 5, "(1,)": 6}),
        (np.float64(2.5), 2.5),
        (np.float64("nan"), None),
        ([1, "é", None, True], [1, "é", None, True]),
        (10**4500, "an integer of 14,949 bits"),
        (Broken(), "a Broken"),
    ],
    ids=range(9),
)
def test_values_that_json_cannot_express(value: Any, read: Any) -> None:
    assert strict(json_text(value)) == read


ODD = {"circle": circle(), "deep": deep(3_000), "inside": {"a": deep(5_000)}, "long": [Wordy()] * 2}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_nothing_raises(value: Any) -> None:
    text = json_text({"x": math.nan, "value": value})
    assert len(text) < 30_000
    strict(text)


def test_half_a_character_is_written_as_its_escape() -> None:
    line = json_line({"a": "\ud800é"})
    assert line == b'{"a": "\\ud800\xc3\xa9"}\n'
    assert json.loads(line) == {"a": "\ud800é"}


def test_plain_values_are_written_as_ever() -> None:
    value = {"a": [1, 2.5, "x", None, True], "b": {"ü": -0.0}}
    assert json_text(value) == json.dumps(value, ensure_ascii=False)
    assert json_text(value, indent=2, ascii_only=True) == json.dumps(value, indent=2)
