"""Matches regular expressions from data, tools and servers in linear time.

Python's own engine backtracks: `^(.+)+\\x00$` takes years on a few dozen letters. Here Python's parser reads the
pattern, so that it keeps its meaning, and pydantic's engine (Rust's regex), which is linear in the text, matches it.
That engine has neither look-around nor back-references: patterns that use them are rejected when they are compiled.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

_c: Any = re._constants  # type: ignore[attr-defined]
_parser: Any = re._parser  # type: ignore[attr-defined]

MAX_CHARS = 10_000
"""Length limit of a pattern."""
MAX_SIZE = 2_500
"""Characters and sets of a pattern with its repeats expanded. The engine is linear in the text, but the time per
character grows with the pattern: `(?:a{0,300}){0,300}` takes 10 ms per character."""
TOO_LARGE = "it is too large when its repeats are expanded; use smaller repeats"
_UNSUPPORTED = {
    _c.ASSERT: "look-around such as (?=…) and (?<=…)",
    _c.ASSERT_NOT: "look-around such as (?!…) and (?<!…)",
    _c.GROUPREF: "back-references such as \\1",
    _c.GROUPREF_EXISTS: "conditional groups such as (?(1)…)",
    _c.ATOMIC_GROUP: "atomic groups (?>…)",
    _c.POSSESSIVE_REPEAT: "possessive repeats such as a*+",
}
_CATEGORIES = {
    _c.CATEGORY_DIGIT: (r"\d", "0-9"),
    _c.CATEGORY_SPACE: (r"\s\x1c-\x1f", r" \t\n\r\f\v"),
    _c.CATEGORY_WORD: (r"\w", "0-9A-Za-z_"),
}
_NEGATED = {
    _c.CATEGORY_NOT_DIGIT: _c.CATEGORY_DIGIT,
    _c.CATEGORY_NOT_SPACE: _c.CATEGORY_SPACE,
    _c.CATEGORY_NOT_WORD: _c.CATEGORY_WORD,
}

_POSITIONS = {
    _c.AT_BEGINNING: (r"\A", "(?m:^)"),
    _c.AT_END: (r"(?:\n?\z)", "(?m:$)"),  # Python's $ also matches before a line feed at the very end
    _c.AT_BEGINNING_STRING: (r"\A", r"\A"),
    _c.AT_END_STRING: (r"\z", r"\z"),
    _c.AT_BOUNDARY: (r"\b", r"\b"),
    _c.AT_NON_BOUNDARY: (r"\B", r"\B"),
}
"""Without and with the flag `MULTILINE`."""


class PatternError(ValueError):
    """An invalid pattern, or one that cannot be matched in linear time; the message says which."""


class Pattern:
    """A compiled pattern; `search` returns whether a text contains a match."""

    __slots__ = ("_validator", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        schema = core_schema.str_schema(pattern=_translate(pattern), regex_engine="rust-regex")
        try:
            self._validator = SchemaValidator(schema)
        except SchemaError as fault:
            reason = str(fault).rpartition("error: ")[2].strip() or "it cannot be compiled"
            raise PatternError(TOO_LARGE if "size limit" in str(fault) else reason) from None

    def search(self, text: str) -> bool:
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()  # lone surrogates are not valid text
        return self._validator.isinstance_python(text)


@lru_cache(maxsize=128)
def compile_pattern(pattern: str) -> Pattern:
    """Compile `pattern` (Python syntax) for `search`. Raises `PatternError` if that is not possible."""
    return Pattern(pattern)


def _translate(pattern: str) -> str:
    if len(pattern) > MAX_CHARS:
        raise PatternError(f"it has {len(pattern)} characters, more than {MAX_CHARS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(pattern)
        translated = _sequence(parsed, parsed.state.flags)
        if _size(parsed) > MAX_SIZE:
            raise PatternError(TOO_LARGE)
        return translated
    except PatternError:
        raise
    except (re.error, OverflowError) as fault:
        raise PatternError(str(fault)) from None
    except RecursionError:
        raise PatternError("it is nested too deeply") from None


def _sequence(items: Iterable[tuple[Any, Any]], flags: int) -> str:
    return "".join(_item(kind, value, flags) for kind, value in items)


def _size(items: Iterable[tuple[Any, Any]]) -> int:
    """Expanded size of a sequence that `_sequence` has accepted."""
    size = 0
    for kind, value in items:
        if kind is _c.BRANCH:
            size += sum(map(_size, value[1]))
        elif kind is _c.SUBPATTERN:
            size += _size(value[-1])
        elif kind in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            least, most, inner = value
            size += max(1, least + 1 if most is _c.MAXREPEAT else most) * max(1, _size(inner))
        else:
            size += 1
    return size


def _item(kind: Any, value: Any, flags: int) -> str:
    if kind in _UNSUPPORTED:
        raise PatternError(f"{_UNSUPPORTED[kind]} cannot be matched in linear time; rewrite the pattern without it")
    if kind is _c.ANY:
        return r"(?s:.)" if flags & re.DOTALL else r"[^\n]"
    if kind in (_c.LITERAL, _c.NOT_LITERAL, _c.IN):
        negation = [(_c.NEGATE, None)] if kind is _c.NOT_LITERAL else []
        text = _set(value if kind is _c.IN else [*negation, (_c.LITERAL, value)], flags)
        return f"(?i:{text})" if flags & re.IGNORECASE else text
    if kind is _c.AT:
        return _POSITIONS[value][bool(flags & re.MULTILINE)]
    if kind is _c.BRANCH:
        return f"(?:{'|'.join(_sequence(branch, flags) for branch in value[1])})"
    if kind is _c.SUBPATTERN:
        _, added, removed, inner = value
        return f"(?:{_sequence(inner, (flags | added) & ~removed)})"
    if kind in (_c.MAX_REPEAT, _c.MIN_REPEAT):
        least, most, inner = value
        return f"(?:{_sequence(inner, flags)}){{{least},{'' if most is _c.MAXREPEAT else most}}}"
    raise PatternError(f"it uses {str(kind).lower()}, which cannot be matched in linear time")


def _letter(code: int) -> str:
    if 0xD800 <= code <= 0xDFFF:
        raise PatternError("a lone surrogate is not valid text")
    return f"\\x{{{code:x}}}"


def _set(items: list[tuple[Any, Any]], flags: int) -> str:
    negated = "^" if items and items[0][0] is _c.NEGATE else ""
    parts = []
    for kind, value in items[len(negated) :]:
        if kind is _c.LITERAL:
            parts.append(_letter(value))
        elif kind is _c.RANGE:
            parts.append(f"{_letter(value[0])}-{_letter(value[1])}")
        elif kind is _c.CATEGORY:
            letters = _CATEGORIES[_NEGATED.get(value, value)][bool(flags & re.ASCII)]
            parts.append(f"[^{letters}]" if value in _NEGATED else f"[{letters}]")
        else:
            raise PatternError(f"a set with {str(kind).lower()} in it is not supported")
    return f"[{negated}{''.join(parts)}]"
