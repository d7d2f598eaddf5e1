"""Parsing numbers as people write them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.rewards.library.matching import last_number, parse_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", "7"),
        ("it is 1,234,567.", "1234567"),
        ("$1,234.50 a day", "1234.50"),
        ("-5", "-5"),
        ("−5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("+5", "5"),
        ("10-3", "3"),
        ("(4)-3", "3"),
        ("x = -3", "-3"),
        (".5", "0.5"),
        ("3.", "3"),
        ("1e-3", "0.001"),
        ("2.5E2", "250"),
        ("5each", "5"),
        ("5eggs", "5"),
        ("in 2001,2002", "2002"),
        ("1,2345", "2345"),
        ("1,23", "23"),
        ("72.00", "72"),
        ("٣", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, "7"),
        (0.1, "0.1"),
        (1e300, "1e300"),
        (" 1,000 ", "1000"),
        ("-$3.5", "-3.5"),
        ("7 apples", None),
        ("1 2", None),
        (True, None),
        (float("nan"), None),
        (float("inf"), None),
        (None, None),
        ([1], None),
    ],
)
def test_a_value_that_is_a_number(value: Any, number: str | None) -> None:
    assert parse_number(value) == (None if number is None else Decimal(number))


@settings(deadline=None)
@given(st.integers())
def test_thousands_are_read_as_they_are_written(value: int) -> None:
    assert parse_number(f"{value:,}") == last_number(f"so {value:,}.") == value


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_without_fault(text: str) -> None:
    last_number(text)
    parse_number(text)


def test_a_million_digits_cost_little() -> None:
    assert last_number("9" * 1_000_000) is not None
    assert last_number("1,111" * 200_000) is not None
