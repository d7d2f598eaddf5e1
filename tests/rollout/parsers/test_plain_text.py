"""Formats that leave text unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.rollout.parsers import PARSERS

TEXT = ' <think>so</think>\n<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>[TOOL_CALLS]f[ARGS]{}<action>x\n'


@pytest.mark.parametrize("name", ["none", "openai"])
def test_text_is_text(name: str) -> None:
    assert PARSERS[name](TEXT) == (TEXT, [])


@pytest.mark.parametrize("name", ["none", "openai"])
@given(text=st.text())
def test_any_text_is_text(name: str, text: str) -> None:
    assert PARSERS[name](text) == (text, [])
