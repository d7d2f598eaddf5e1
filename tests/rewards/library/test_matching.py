"""Exact and numeric match rewards."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.rewards.library.matching import exact_match, exact_match_reward, numeric_match, numeric_match_reward


def said(text: str) -> list[Message]:
    return [Message(role="user", content="?"), Message(role="assistant", content=text)]


@pytest.mark.parametrize(
    ("text", "wanted", "options", "hit"),
    [
        ("Paris", "Paris", {}, True),
        (" Paris\n", "Paris", {}, True),
        ("New  York", "New York", {}, True),
        ("New  York", "New York", {"ignore_space": False}, False),
        ("paris", "Paris", {}, False),
        ("PARIS", "paris", {"ignore_case": True}, True),
        ("Straße", "STRASSE", {"ignore_case": True}, True),
        ("cafe\u0301", "café", {}, True),
        ("Paris.", "Paris", {}, False),
    ],
)
def test_exact_match(text: str, wanted: str, options: dict[str, bool], hit: bool) -> None:
    assert exact_match(text, wanted, **options) is hit


@settings(deadline=None)
@given(st.text())
def test_every_text_matches_itself(text: str) -> None:
    assert exact_match(text, text)
    assert exact_match(text, text, ignore_case=True, ignore_space=False)


@pytest.mark.parametrize(
    ("text", "truth", "options", "score"),
    [
        ("<think>Rome? no</think> Paris", "Paris", {}, 1),
        ("I say\nAnswer: Paris", "Paris", {"after": "Answer:"}, 1),
        ("Answer: Rome. No. Answer: Paris", "Paris", {"after": "Answer:"}, 1),
        ("Paris", "Paris", {"after": "Answer:"}, 0),
        ("UK", ["United Kingdom", "UK"], {}, 1),
        ("7", 7, {}, 1),
        ("", "Paris", {}, 0),
    ],
)
def test_exact_match_as_a_reward(text: str, truth: Any, options: dict[str, Any], score: float) -> None:
    assert exact_match_reward(said(text), truth, **options).score == score


@pytest.mark.parametrize("truth", [None, True, {"a": 1}, [], [None]])
def test_a_ground_truth_that_is_no_text_is_an_error(truth: Any) -> None:
    with pytest.raises(DataError, match="ground truth"):
        exact_match_reward(said("x"), truth)


@pytest.mark.parametrize(
    ("a", "b", "options", "hit"),
    [
        ("1.0", "1", {}, True),
        ("0.3", "0.2", {"abs_tol": 0.1}, True),
        ("0.31", "0.2", {"abs_tol": 0.1}, False),
        ("101", "100", {"rel_tol": 0.01}, True),
        ("102", "100", {"rel_tol": 0.01}, False),
        ("0.001", "0", {"rel_tol": 0.5}, False),
        ("1e9999", "1e9999", {}, True),
        ("1e9999", "1", {"abs_tol": 1e300}, False),
        ("1", "1e9999", {"rel_tol": 1.0}, False),
        ("100000000000000000001", "100000000000000000000", {}, False),
    ],
)
def test_numeric_match(a: str, b: str, options: dict[str, float], hit: bool) -> None:
    assert numeric_match(Decimal(a), Decimal(b), **options) is hit


@pytest.mark.parametrize(
    ("text", "truth", "options", "score"),
    [
        ("It is 1,234.0 in all.", 1234, {}, 1),
        ("<think>5</think> It is 6", "6", {}, 1),
        ("Answer: 3 (of 10)", 10, {"after": "Answer:"}, 1),
        ("3.14", 3.14159, {"abs_tol": 0.01}, 1),
        ("3.1", 3.14159, {"abs_tol": 0.01}, 0),
        ("two or 2", ["3", 2], {}, 1),
        ("none", 2, {}, 0),
        ("2", 2, {"after": "Answer:"}, 0),
    ],
)
def test_numeric_match_as_a_reward(text: str, truth: Any, options: dict[str, Any], score: float) -> None:
    assert numeric_match_reward(said(text), truth, **options).score == score


@pytest.mark.parametrize("truth", [None, "many", True, {}, []])
def test_a_ground_truth_that_is_no_number_is_an_error(truth: Any) -> None:
    with pytest.raises(DataError, match="ground truth"):
        numeric_match_reward(said("1"), truth)


def test_a_tolerance_below_nought_is_an_error() -> None:
    with pytest.raises(ConfigError, match="abs_tol"):
        numeric_match_reward(said("1"), 1, abs_tol=-1)
