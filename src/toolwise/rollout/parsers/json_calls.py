"""Shared by the parsers: finding JSON inside text, splitting off the leading thought, and extracting calls.

Any text is read in time linear in its length. Values are only searched for after a mark such as `<tool_call>`, and no
mark is valid JSON: of two searches that both continue past a mark, one is inside a string and the other outside, and
the one outside ends at the next mark. So every character is read a bounded number of times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from toolwise.messages import ToolCall

ParsedReply = tuple[str, list[ToolCall]]
"""The text outside the calls, and the calls. A call that cannot be parsed keeps its text as its arguments."""
RawCall = tuple[str, dict[str, Any] | str]
"""Name and arguments; an empty name and the text if it could not be parsed."""

MAX_DEPTH = 100
"""Nesting depth. Deeper values would parse here and then fail where less of the stack is left."""
MAX_DIGITS = 640
"""Digits of an integer: what Python converts to text and back under any setting."""

_THINK = r"(?P<opening><think>|\[THINK\])|(?P<closing></think>|\[/THINK\])"
_START = re.compile(r"\s*(?P<fence>```\w*\s*)?")
_FENCE_END = re.compile(r"\s*```")
# Possessive: otherwise white space would be given back after a failure and tried again at every position.
_NEXT_VALUE = re.compile(r"\s*+(?:;\s*+)?+(?=\{)")
_TOO_LONG = object()


class JsonSource(str):
    """Text to find JSON in. Disables the line count of decoder errors: slow for every bad call, and never used."""

    __slots__ = ()

    def count(self, *_: object) -> int:
        return 0

    def rfind(self, *_: object) -> int:
        return -1


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
    except (ValueError, RecursionError):
        return None
    fence_end = _FENCE_END.match(source, end) if opening["fence"] else None
    return JsonMatch(value, fence_end.end() if fence_end else end)


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


def to_call(value: Any, text: str) -> RawCall:
    """The call that a JSON value describes; its raw `text` if it is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not is_storable(value):
        return "", text
    return value["name"], to_arguments(value.get("arguments", value.get("parameters", {})))


def to_arguments(value: Any) -> dict[str, Any] | str:
    """Arguments as an object, also if given as JSON in a string; anything else as text."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    match = decode(JsonSource(value), 0)
    complete = match is not None and not value[match.end :].strip()
    return match.value if match and complete and isinstance(match.value, dict) and is_storable(match.value) else value


def number_calls(calls: Iterable[RawCall]) -> list[ToolCall]:
    return [ToolCall(id=f"call_{i}", name=name, arguments=arguments) for i, (name, arguments) in enumerate(calls)]


def dump_call(name: str, arguments: dict[str, Any] | str, key: str = "arguments") -> str:
    """A call as JSON; a call that could not be parsed as it was written."""
    if not name and isinstance(arguments, str):
        return arguments
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def replace_surrogates(text: str) -> str:
    """`text` with "?" for lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def mark_pattern(call: str) -> re.Pattern[str]:
    """Pattern for `split_reasoning`: where thoughts start and end, and where calls start."""
    return re.compile(f"{_THINK}|(?P<call>{call})", re.IGNORECASE | re.ASCII)


def split_reasoning(text: str, marked: re.Pattern[str]) -> tuple[str, JsonSource]:
    """Split into the leading thought, with the text before it, and the rest, in which calls are searched for.

    A thought may have been opened in the prompt: then only its end is here. A thought that never ends is the whole
    text. An end tag inside a call's JSON is part of a string, and a thought that starts after a call is not the leading
    one.
    """
    source = JsonSource(replace_surrogates(text))
    position, opened_at, seen_call = 0, -1, False
    while mark := marked.search(source, position):
        position = mark.end()
        if mark.lastgroup == "closing":
            return source[:position], JsonSource(source[position:])
        if mark.lastgroup == "opening":
            if seen_call:
                break
            opened_at = mark.start() if opened_at < 0 else opened_at
        elif opened_at < 0:
            end = _skip_values(source, position)
            seen_call = seen_call or end > position
            position = max(end, position + (mark.end() == mark.start()))  # a mark may match the empty string
    if opened_at >= 0 and not source[:opened_at].strip():
        return source[:], JsonSource("")
    return "", source


def _skip_values(source: JsonSource, position: int) -> int:
    """End of the JSON values that start at `position`: one per line, or separated by `;`."""
    while match := decode(source, position):
        position = match.end
        separator = _NEXT_VALUE.match(source, position)
        if not separator:
            break
        position = separator.end()
    return position


def collect_calls(
    head: str,
    body: JsonSource,
    opening: re.Pattern[str],
    read: Callable[[JsonSource, int], tuple[Sequence[RawCall], int]],
) -> ParsedReply:
    """Parse what `read` finds after each `opening` in `body` as calls; the remaining text is appended to `head`."""
    outside: list[str] = []
    calls: list[RawCall] = []
    position = 0
    while mark := opening.search(body, position):
        outside.append(body[position : mark.start()])
        new_calls, position = read(body, mark.end())
        calls.extend(new_calls)
    outside.append(body[position:])
    return head + "".join(outside).strip(), number_calls(calls)
