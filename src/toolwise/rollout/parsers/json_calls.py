"""Shared by the parsers: finding JSON inside text, splitting off the leading thoughts, and extracting calls.

Any text is read in time linear in its length. Values are only searched for after a mark such as `<tool_call>`, and no
mark is valid JSON: of two searches that both continue past a mark, one is inside a string and the other outside, and
the one outside ends at the next mark. So every character is read a bounded number of times.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from toolwise.messages import ToolCall
from toolwise.untrusted.bounds import MAX_CALLS

ParsedReply = tuple[str, list[ToolCall]]
"""The text outside the calls, and the calls. A call that cannot be parsed keeps its text as its arguments."""
RawCall = tuple[str, dict[str, Any] | str]
"""Name and arguments; an empty name and the text if it could not be parsed."""

MAX_DEPTH = 100
"""Nesting depth. Deeper values would parse here and then fail where less of the stack is left."""
MAX_DIGITS = 640
"""Digits of an integer: what Python converts to text and back under any setting."""

THOUGHT_OPENINGS = ("<think>", "[THINK]", "<seed:think>", "<|START_THINKING|>", "<|channel>thought")
THOUGHT_CLOSINGS = ("</think>", "[/THINK]", "</seed:think>", "<|END_THINKING|>", "<channel|>")
"""Qwen, DeepSeek, GLM and others; Mistral; Seed; Cohere; Gemma 4."""

_SPACE = re.compile(r"\s*")
_START = re.compile(r"\s*(?P<fence>```\w*\s*)?")
_FENCE_END = re.compile(r"\s*```")
# Possessive: otherwise white space would be given back after a failure and tried again at every position.
_NEXT_VALUE = re.compile(r"\s*+(?:;\s*+)?+(?=\{)")
_TOO_LONG = object()
_UNDECIDED_CHARS = 16
"""A JSON error this close to the end of a partial text may only mean that a word such as `-Infinity` is incomplete."""


class JsonSource(str):
    """Text to find JSON in. Disables the line count of decoder errors: slow for every bad call, and never used."""

    __slots__ = ()

    def count(self, *_: object) -> int:
        return 0

    def rfind(self, *_: object) -> int:
        return -1


class PartialSource(JsonSource):
    """The beginning of a text that is still being written."""

    __slots__ = ()


class NeedMoreTextError(Exception):
    """How a partial text is read depends on what follows. Never raised for a complete one."""


def need_more(source: str) -> None:
    """Call where the end of `source` decides how it is read."""
    if isinstance(source, PartialSource):
        raise NeedMoreTextError


class JsonMatch(NamedTuple):
    value: Any
    end: int


def _integer(digits: str) -> Any:
    return int(digits) if len(digits) <= MAX_DIGITS else _TOO_LONG


_DECODER = json.JSONDecoder(parse_int=_integer)


def decode(source: JsonSource, start: int) -> JsonMatch | None:
    """The JSON value at `start`, with or without a code fence, and where it ends; None if missing or incomplete."""
    opening = _START.match(source, start)
    assert opening is not None  # it may match the empty string
    try:
        value, end = _DECODER.raw_decode(source, opening.end())
    except ValueError as fault:
        if isinstance(source, PartialSource) and _may_be_cut_off(source, fault):
            raise NeedMoreTextError from None
        return None
    except RecursionError:
        return None
    fence_end = _FENCE_END.match(source, end) if opening["fence"] else None
    if end == len(source) and not isinstance(value, dict | list):
        need_more(source)  # a number may go on
    if opening["fence"] and not fence_end and not source[end : end + 64].strip("` \t\r\n"):
        need_more(source)
    return JsonMatch(value, fence_end.end() if fence_end else end)


def _may_be_cut_off(source: str, fault: ValueError) -> bool:
    position = fault.pos if isinstance(fault, json.JSONDecodeError) else 0
    return "Unterminated string" in str(fault) or len(source) - position <= _UNDECIDED_CHARS


def is_storable(value: Any) -> bool:
    """Whether a value can be stored: finite, no lone surrogates, numbers and nesting within bounds."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            break
    else:
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError):
        return False
    return True


def to_call(value: Any, text: str, name_key: str = "name") -> RawCall:
    """The call that a JSON value describes; its raw `text` if it is not one."""
    if not isinstance(value, dict) or not isinstance(value.get(name_key), str) or not is_storable(value):
        return "", text
    return value[name_key], to_arguments(value.get("arguments", value.get("parameters", {})))


def to_arguments(value: Any) -> dict[str, Any] | str:
    """Arguments as an object, also if given as JSON in a string; anything else as text."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    match = decode(JsonSource(value), 0)
    complete = match is not None and not value[match.end :].strip()
    return match.value if match and complete and isinstance(match.value, dict) and is_storable(match.value) else value


def number_calls(calls: Sequence[RawCall], first: int = 0) -> list[ToolCall]:
    """Calls with ids; those beyond `MAX_CALLS` become one bad call, which tells the model."""
    if first == 0 and len(calls) > MAX_CALLS:
        missing = f"{len(calls) - MAX_CALLS} more calls were dropped: a reply may have at most {MAX_CALLS}"
        calls = [*calls[:MAX_CALLS], ("", missing)]
    return [
        ToolCall(id=f"call_{i}", name=name, arguments=arguments) for i, (name, arguments) in enumerate(calls, first)
    ]


def dump_call(name: str, arguments: dict[str, Any] | str, key: str = "arguments", name_key: str = "name") -> str:
    """A call as JSON; a call that could not be parsed as it was written."""
    if not name and isinstance(arguments, str):
        return arguments
    return json.dumps({name_key: name, key: arguments}, ensure_ascii=False)


def dump_arguments(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def replace_surrogates(text: str) -> str:
    """`text` with "?" for lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def any_of(marks: Iterable[str]) -> str:
    """Pattern for any of these texts; the longest first, since one may start another."""
    return "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)"


OPENING = re.compile(any_of(THOUGHT_OPENINGS), re.IGNORECASE | re.ASCII)
CLOSING = re.compile(any_of(THOUGHT_CLOSINGS), re.IGNORECASE | re.ASCII)


def mark_pattern(call: str, other: str = "(?!)") -> re.Pattern[str]:
    """Pattern for `split_reasoning`: where thoughts start and end, where calls start, and other marks of the format."""
    return re.compile(
        f"(?P<opening>{OPENING.pattern})|(?P<closing>{CLOSING.pattern})|(?P<call>{call})|(?P<other>{other})",
        re.IGNORECASE | re.ASCII,
    )


def split_reasoning(
    text: str,
    marked: re.Pattern[str],
    skip: Callable[[JsonSource, re.Match[str]], int] | None = None,
    thought_open: bool | None = None,
) -> tuple[str, JsonSource]:
    """Split into the leading thoughts, with the text before them, and the rest, in which calls are searched for.

    A thought that never ends goes to the end of the text. Thoughts that follow the first directly, with only blanks
    between, are leading ones too. An end tag inside a call's arguments is part of a string (`skip` gives
    the end of a complete call), and a thought that starts after a call is not a leading one.

    `thought_open`: whether the prompt has opened a thought, so that only its end is here. If it has not, only a thought
    that starts the text is one. None: not known. Then a thought's end anywhere ends the leading thought, even after
    text that looks like a call.
    """
    source = JsonSource(replace_surrogates(text))
    position, opened_at, seen_call = 0, 0 if thought_open else -1, False
    while mark := marked.search(source, position):
        position = mark.end()
        if mark.lastgroup == "closing":
            if thought_open is None or opened_at >= 0:
                end = _skip_thoughts(source, position)
                return source[:end], JsonSource(source[end:])
        elif mark.lastgroup == "opening":
            if seen_call or (thought_open is False and opened_at < 0 and blank_end(source) < mark.start()):
                break
            opened_at = mark.start() if opened_at < 0 else opened_at
        elif opened_at < 0 and thought_open is False:
            break
        elif opened_at < 0 and mark.lastgroup == "call":
            end = skip(source, mark) if skip else skip_values(source, position)
            seen_call = seen_call or end > position
            position = max(end, position + (mark.end() == mark.start()))  # a mark may match the empty string
    return (source[:], JsonSource("")) if opened_at >= 0 else ("", source)


def _skip_thoughts(source: str, position: int) -> int:
    """End of the thoughts that start at `position`, if any do."""
    while opening := OPENING.match(source, blank_end(source, position)):
        closing = CLOSING.search(source, opening.end())
        position = closing.end() if closing else len(source)
    return position


def blank_end(text: str, position: int = 0) -> int:
    """End of the white space and of the characters that cannot be seen, such as U+FEFF, at `position`."""
    while space := _SPACE.match(text, position):
        position = space.end()
        if not is_format_character(text[position : position + 1]):
            break
        position += 1
    return position


def is_format_character(letter: str) -> bool:
    return bool(letter) and unicodedata.category(letter) == "Cf"


def skip_values(source: JsonSource, position: int) -> int:
    """End of the JSON values that start at `position`: one per line, or separated by `;`."""
    while match := decode(source, position):
        position = match.end
        separator = _NEXT_VALUE.match(source, position)
        if not separator:
            break
        position = separator.end()
    return position
