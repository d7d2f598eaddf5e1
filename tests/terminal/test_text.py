"""Control characters are escaped."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.terminal import escape_controls
from toolwise.terminal.streams import escape_controls_json

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "hyperlink": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "clear": "\x1b[2J\x1b[H",
    "colour": "\x1b[31mred\x1b[0m",
    "8-bit csi": "\x9b31m",
    "8-bit osc": "\x9d0;owned\x9c",
    "overwrite": "all wrong\rall right",
    "backspaces": "wrong\x08\x08\x08\x08\x08right",
    "delete": "a\x7fb",
    "bell": "\x07",
    "override": "\u202egnirts\u202c",
    "isolate": "\u2066x\u2069",
    "zero width": "a\u200bb\ufeffc",
    "tags": "\U000e0041\U000e0042",
    "half": "\ud800",
    "lines": "a\u2028b\x85c\x0bd\x0ce",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_control_characters_are_left(name: str) -> None:
    shown = escape_controls(HOSTILE[name])
    assert shown.encode("utf-8")
    assert [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")] == []
    assert "\\" in shown


def test_it_is_shown_as_an_escape() -> None:
    assert escape_controls("a\x1b[31mb\u202e\U000e0041") == "a\\x1b[31mb\\u202e\\U000e0041"


def test_ordinary_text_is_unchanged() -> None:
    text = "naïve → 日本語 \t🤷🏽‍♀️ سلام\nnext"
    assert escape_controls(text) == text
    assert escape_controls("one\r\ntwo") == "one\ntwo"


@given(st.text())
def test_any_text_is_printable_and_stays_so(text: str) -> None:
    shown = escape_controls(text)
    shown.encode("utf-8")
    assert all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") for c in shown)
    assert escape_controls(shown) == shown


@given(st.text())
def test_json_reads_back_the_same(text: str) -> None:
    shown = escape_controls_json(json.dumps(text, ensure_ascii=False))
    assert json.loads(shown) == json.loads(json.dumps(text))
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    shown.encode("utf-8")
