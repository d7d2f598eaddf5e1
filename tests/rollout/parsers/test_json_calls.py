"""JSON inside text, and where a leading thought ends: code shared by the formats."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    decode,
    is_storable,
    mark_pattern,
    replace_surrogates,
    split_reasoning,
    to_arguments,
)

MARKS = mark_pattern("<call>")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ).filter(lambda value: isinstance(value, dict | list)),
    st.text(),
)
def test_a_value_ends_where_it_ends_whatever_follows(value: Any, after: str) -> None:
    text = f"x {json.dumps(value)}"
    found = decode(JsonSource(text + after), 1)
    assert found is not None
    assert (found.value, found.end) == (value, len(text))


@pytest.mark.parametrize(
    "text",
    ["", " ", "x", "{", '{"a": 1', '"a', "[1,]", "{'a': 1}", "tru", "```", pytest.param("[" * 100_000, id="deep")],
)
def test_half_a_value_is_none(text: str) -> None:
    assert decode(JsonSource(text), 0) is None


def test_a_raw_newline_inside_a_string_is_no_json() -> None:
    assert decode(JsonSource('{"a": "x\ny"}'), 0) is None


def test_a_bad_value_costs_no_more_at_the_end_of_a_long_text() -> None:
    """The decoder's errors scan all preceding text for line breaks, twice: 20 MB each time."""
    source = JsonSource("x" * 20_000_000 + "{")
    began = time.process_time()
    assert not any(decode(source, len(source) - 1) for _ in range(3000))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {"a": [-float("inf")]}, "\ud800", {"\udfff": 1}, [10**5000], object()]
)
def test_what_cannot_be_written_down_is_not_sound(value: Any) -> None:
    assert not is_storable(value)


@pytest.mark.parametrize("value", [{}, {"a": [1, 2.5, None, True, "é🦉"]}, [10**600]])
def test_what_json_can_say_is_sound(value: Any) -> None:
    assert is_storable(value)


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        (' {"a": 1}\n', {"a": 1}),
        ('{"a": 1} and more', '{"a": 1} and more'),
        ('{"a": 1}{"b": 2}', '{"a": 1}{"b": 2}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[1]", "[1]"),
        ([1], "[1]"),
        (None, "null"),
    ],
)
def test_arguments_are_one_object_or_text(value: Any, arguments: Any) -> None:
    assert to_arguments(value) == arguments


@given(st.text(st.characters()))
def test_cleaned_text_can_be_written_and_only_halves_of_characters_change(text: str) -> None:
    cleaned = replace_surrogates(text)
    cleaned.encode()
    assert cleaned == "".join("?" if "\ud800" <= c <= "\udfff" else c for c in text)


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("It is 4.", ""),
        ("<think>a</think>b", "<think>a</think>"),
        (" \n<think>a</think>b</think>", " \n<think>a</think>"),
        ("a</think>b", "a</think>"),
        ("a <call>{} b</think>c", "a <call>{} b</think>"),
        ("Hm. <think>a <call>{}</think>c", "Hm. <think>a <call>{}</think>"),
        ("[THINK]a[/THINK]b", "[THINK]a[/THINK]"),
        ("<think>a <call>{}", "<think>a <call>{}"),
        ("the <think> tag <call>{}", "the <think> tag <call>{}"),
        ("<call>{} <think>a <call>{}", ""),
        ("<think>a</think>\n<think>b <call>{}</think>c", "<think>a</think>\n<think>b <call>{}</think>"),
        ("a</think>[THINK]b[/THINK] <think>c</think>d", "a</think>[THINK]b[/THINK] <think>c</think>"),
        ("<think>a</think> \u200b<think>b <call>{}", "<think>a</think> \u200b<think>b <call>{}"),
        ("<think>a</think>b <think>c</think>", "<think>a</think>"),
        ("\ufeff<think>a <call>{}", "\ufeff<think>a <call>{}"),
        (" \u200b\u2060 <think>a</think>b", " \u200b\u2060 <think>a</think>"),
        ('<call>{"a": "</think>"} b', ""),
        ('<call>{"a": 1}\n{"a": "</think>"} b', ""),
        ('<call>{"a": 1}; {"a": "</think>"} b', ""),
        ("<call>{} <think>a</think> b", ""),
        ("I use <call> and <think>.</think>b", "I use <call> and <think>.</think>"),
        ('<think><call>{"a": "</think>"}', '<think><call>{"a": "</think>'),
    ],
)
def test_where_the_leading_thought_ends(text: str, thought: str) -> None:
    assert split_reasoning(text, MARKS) == (thought, text.removeprefix(thought))


@pytest.mark.parametrize("text", ["\ufeff<think>a <call>{}", " \u200b \u200b<think>a <call>{}"])
def test_characters_that_cannot_be_seen_may_come_before_the_thought(text: str) -> None:
    assert split_reasoning(text, MARKS, thought_open=False) == (text, "")
