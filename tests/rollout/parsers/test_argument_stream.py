"""The arguments of a call, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.rollout.parsers.argument_stream import ArgumentStream

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.integers(1, 9), st.booleans())
def test_pieces_are_the_arguments_without_the_last_brace(value: dict[str, object], size: int, ascii_only: bool) -> None:
    arguments = json.dumps(value, ensure_ascii=ascii_only)
    text, stream = f', "arguments": {arguments}}}</tool_call>', ArgumentStream()
    pieces = [stream.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) == arguments[:-1]
    assert stream.fed == len(text)


@pytest.mark.parametrize("rest", [', "arguments": "text"}', ', "id": 3}', "}", " " * 100 + ', "arguments": {"a": 1}}'])
def test_arguments_that_do_not_follow_the_name_as_an_object_are_not_streamed(rest: str) -> None:
    stream = ArgumentStream()
    assert "".join(map(stream.feed, rest)) == ""
