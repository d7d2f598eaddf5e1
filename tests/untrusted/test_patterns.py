"""Patterns mean the same as in Python and take time linear in the text."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.untrusted.patterns import Pattern, PatternError, compile_pattern

TEXTS = [
    "",
    "a",
    "ab",
    "done",
    "done\n",
    "done\n\n",
    "x\ndone\ny",
    "DONE",
    "Answer: 42",
    "Answer: 42\n",
    "a b\tc\x1cd",
    "été 12",
    "[x] {y} (z) \\ ^ $ . | ? * + - & ~ #",
    "\x00",
    "aXbXc",
    "2024-01-02",
    "<answer>yes</answer>",
    "&&--~~",
]
PATTERNS = [
    "done",
    "^done$",
    r"\Adone\Z",
    r"done\Z",
    "(?i)done",
    "(?m)^done$",
    "(?s)a.b",
    "a.b",
    "x.done",
    "(?s)x.done",
    r"Answer: (-?\d+)$",
    r"Answer:\s*(\S+)\s*$",
    r"\bdone\b",
    r"\Bone\b",
    r"[^a-c]",
    r"[\d\s]",
    r"[^\w]",
    r"[\W]",
    r"\S+ \S+",
    r"(?P<x>a|b)c?",
    "a{2}",
    "a{1,}",
    "(?:ab)*?$",
    r"[\]\[]",
    r"[a\-z]",
    r"[&~-]",
    r"[&&]",
    r"\$|\^",
    r"\x00",
    r"(?a)\w+ \d",
    r"é",
    r"(?i)ÉTÉ",
    r"(?x) d o n e  # spaced",
    r"<answer>.*</answer>",
    "",
    "$",
    "^",
    "()",
    "(?i:DO)ne",
    r"\d{4}-\d{2}-\d{2}",
    r"\s",
    r"[^\S]",
    r"a|",
    r"#",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_means_what_python_means(pattern: str) -> None:
    for text in TEXTS:
        assert Pattern(pattern).search(text) == bool(re.search(pattern, text)), text


@settings(max_examples=200, deadline=None)
@given(
    st.from_regex(r"\A(?:[ab.^$|?*+\n]|\\[dswDSWbBAZ]|\[[^\]\\\[^-]+\]|\(\w*\)|\{\d\}){1,8}\Z"),
    st.text(alphabet="ab1 \n_é", max_size=12),
)
def test_it_means_the_same_for_any_pattern(pattern: str, text: str) -> None:
    try:
        wanted = bool(re.search(pattern, text))
    except re.error:
        with pytest.raises(PatternError):
            Pattern(pattern)
        return
    try:
        found = Pattern(pattern)
    except PatternError:  # such as a possessive repeat
        return
    inside = re.search(r"\$(?![|)]|\Z)", pattern)  # what follows a `$` that is not the end has nothing to match
    empty = not text and r"\B" in pattern  # whose meaning differs between Python versions
    assert found.search(text) == wanted or inside or empty


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "back-references"),
        (r"(a)?(?(1)b|c)", "conditional"),
        ("(?>a+)b", "atomic"),
        ("a*+b", "possessive"),
        ("(", "unterminated"),
        ("[z-a]", "bad character range"),
        ("(?:a{1000}){1000}", "too large"),
        ("a" * 10_001, "10001 characters"),
        ("(" * 5000 + ")" * 5000, "nested"),
        ("a{99999999999}", "repetition"),
        ("\ud800", "surrogate"),
        (r"\ud800", "surrogate"),
    ],
)
def test_unsupported_patterns_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=f"(?i){re.escape(why)}"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "unit"),
    [
        (r"^(.+)+\x00$", "a"),
        (r"(a+)+$", "a"),
        (r"(a|aa)+$", "a"),
        (r"(a|a?)+$", "a"),
        (r"(.*a){20}", "a b"),
        (r"^(\w+\s?)*$", "word "),
        (r"(x+x+)+y", "x"),
        (r"\s*\s*\s*$x", " "),
        (r"([a-zA-Z]+)*@", "abc"),
        (r"(?:a?){200}a{200}", "a"),
    ],
)
def test_no_pattern_takes_exponential_time(pattern: str, unit: str) -> None:
    """For most of them Python's engine would take longer than the age of the universe."""
    found = compile_pattern(pattern)
    began = time.process_time()
    found.search(unit * (200_000 // len(unit)) + "!")
    assert time.process_time() - began < 5


def test_lone_surrogates_can_be_searched() -> None:
    assert compile_pattern("b$").search("\ud800 a b")


@pytest.mark.parametrize(
    "pattern",
    ["(?:a{0,300}){0,300}[ab]{0,300}c", "((a{9}){0,9}b){99}", "(?:(?:){1000}){1000}", "(?:a?){3000}", "a{2600,}"],
)
def test_a_pattern_with_huge_repeats_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="too large when its repeats are expanded"):
        compile_pattern(pattern)


@pytest.mark.parametrize("pattern", [r"^.{1,1024}$", r"\d{4}-\d{2}", "(?:a{0,40}){0,40}[ab]{0,300}c", "x{2000}"])
def test_patterns_of_usual_size_are_accepted(pattern: str) -> None:
    began = time.process_time()
    compile_pattern(pattern).search("ab" * 5_000)
    assert time.process_time() - began < 2
