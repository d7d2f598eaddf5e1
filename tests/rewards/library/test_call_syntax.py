"""Parsing calls in Python text and in ground truths, without running them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import DataError
from toolwise.messages import ToolCall
from toolwise.rewards.library.calls import ExpectedCall, expected_calls, parse_python_calls, same_value


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("f()", [("f", {})]),
        ("f(a=1, b='x')", [("f", {"a": 1, "b": "x"})]),
        ("[f(a=-1.5), math.g(b=[1, {'k': None}])]", [("f", {"a": -1.5}), ("math.g", {"b": [1, {"k": None}]})]),
        ("f(a=True)\ng()", [("f", {"a": True}), ("g", {})]),
        ("f(), g()", [("f", {}), ("g", {})]),
        ("```\nf()\n```", [("f", {})]),
        ("  ```python\nf()\n```  ", [("f", {})]),
        (r"f(a='\d')", [("f", {"a": r"\d"})]),
        ("[]", []),
        ("", []),
    ],
)
def test_python_calls(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert [(c.name, c.arguments) for c in parse_python_calls(text)] == calls


@pytest.mark.parametrize(
    "text",
    [
        "just words",
        "words",
        "f(1)",
        "f(*x)",
        "f(**x)",
        "f(a=1, a=2)",
        "f(a=g())",
        "f(a=b)",
        "f(a=__import__('os').system('true'))",
        "f(a={[]: 1})",
        "f(a=1)(b=2)",
        "f[0](a=1)",
        "import os",
        "x = f()",
        "f(" * 100_000,
        "[" * 5_000,
        "f(a=" + "9" * 5_000 + ")",
        "f(a='\0')",
        "f" * 200_000,
        "-" * 90_000,
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_call_is_refused(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError):
        parse_python_calls(text)
    assert time.process_time() - began < 2


@settings(deadline=None)
@given(st.text("fg(a=1,'b)[]{}:\n ", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ValueError):
        assert all(isinstance(call, ToolCall) for call in parse_python_calls(text))


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (True, True, True),
        (0, False, False),
        ("1", 1, False),
        (None, None, True),
        ([1, 2], (1, 2), True),
        ([1, 2], [2, 1], False),
        ([1], [1, 2], False),
        ({"a": [True]}, {"a": [1]}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
    ],
)
def test_equality_is_json_s(given: Any, wanted: Any, same: bool) -> None:
    assert same_value(given, wanted) is same


def test_loose_strings() -> None:
    assert same_value("New-York, N.Y.", "new york ny", loose_strings=True)
    assert same_value({"a": ["X."]}, {"a": ["x"]}, loose_strings=True)
    assert not same_value("x", "y", loose_strings=True)
    assert not same_value("x.", "x")


F = ExpectedCall("f", {"a": [1]})


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ([{"name": "f", "arguments": {"a": 1}}], [F]),
        ([{"name": "f", "parameters": {"a": 1}}], [F]),
        ({"name": "f", "arguments": '{"a": 1}'}, [F]),
        ('[{"name": "f", "arguments": {"a": 1}}]', [F]),
        ([{"type": "function", "id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}], [F]),
        ("f(a=1)", [F]),
        ("[f(a=1), f(a=1)]", [F, F]),
        ([{"f": {"a": [1]}}], [F]),
        ([{"f": {"a": [1], "b": ["", 2]}}], [ExpectedCall("f", {"a": [1], "b": ["", 2]}, frozenset("b"))]),
        ([{"name": "f"}], [ExpectedCall("f", {})]),
        ([{"f": {}}], [ExpectedCall("f", {})]),
        ([], []),
        ("[]", []),
    ],
)
def test_the_forms_of_a_ground_truth(truth: Any, expected: list[ExpectedCall]) -> None:
    assert expected_calls(truth) == expected


@pytest.mark.parametrize(
    "truth",
    [
        None,
        1,
        "just words",
        "f(1)",
        [1],
        [{}],
        [{"f": 1}],
        [{"f": {"a": 1}}],
        [{"f": {"a": []}}],
        [{"f": {}, "g": {}}],
        [{"name": "f", "arguments": "rubbish"}],
        [{"name": "f", "arguments": [1]}],
    ],
)
def test_a_ground_truth_without_calls_is_an_error(truth: Any) -> None:
    with pytest.raises(DataError, match="ground truth"):
        expected_calls(truth)
