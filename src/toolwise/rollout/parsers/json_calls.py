"""What the formats share: JSON in the middle of a text, the leading thought, and calls out of either. For `parsers`.

Whatever a model may write is read in time linear in its length. Values are only looked for behind a mark such as
`<tool_call>`, and no mark is JSON: of two searches that are both still going, one stands inside a string and the other
outside of it, and at the next mark the one outside ends. So every character is looked at a bounded number of times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from toolwise.messages import ToolCall

ParsedReply = tuple[str, list[ToolCall]]
"""The text beside the calls, and the calls. A call that cannot be read keeps its text as its arguments."""
RawCall = tuple[str, dict[str, Any] | str]
"""A name and arguments; no name and some text where nothing could be read."""

MAX_DEPTH = 100
"""Objects in objects. Deeper ones would be read here and then fail wherever less of the stack is left."""
MAX_DIGITS = 640
"""Of a whole number: what Python turns into text and back under any setting."""

_THINK = r"(?P<opening><think>|\[THINK\])|(?P<closing></think>|\[/THINK\])"
_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"```\w*\s*")
_FENCE_END = re.compile(r"\s*```")
# Possessive: what is given back of white space after a failure would be tried again, at each place of it.
_NEXT_VALUE = re.compile(r"\s*+(?:;\s*+)?+(?=\{)")
_TOO_LONG = object()


class JsonSource(str):
    """Text to find JSON in. The decoder's errors count the lines before them, at every bad call anew, for nobody."""

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


def decode(source: JsonSource, at: int) -> JsonMatch | None:
    """The JSON value at `at`, in a code fence or not, and where it ends; None where there is none, or half of one."""
    at = skip_space(source, at)
    fence = _FENCE.match(source, at)
    try:
        value, end = _DECODER.raw_decode(source, fence.end() if fence else at)
    except (ValueError, RecursionError):
        return None
    fence_end = _FENCE_END.match(source, end) if fence else None
    return JsonMatch(value, fence_end.end() if fence_end else end)


def skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def is_storable(value: Any) -> bool:
    """Whether others can keep a value: finite, whole characters, numbers and nesting within bounds."""
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
    """The call that a JSON value stands for; else its `text`, unread."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not is_storable(value):
        return "", text
    return value["name"], to_arguments(value.get("arguments", value.get("parameters", {})))


def to_arguments(given: Any) -> dict[str, Any] | str:
    """Arguments as an object, be it written as JSON in a string; anything else as text."""
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False)
    found = decode(JsonSource(given), 0)
    whole = found is not None and not given[found.end :].strip()
    return found.value if found and whole and isinstance(found.value, dict) and is_storable(found.value) else given


def number_calls(calls: Iterable[RawCall]) -> list[ToolCall]:
    return [ToolCall(id=f"call_{i}", name=name, arguments=arguments) for i, (name, arguments) in enumerate(calls)]


def dump_call(name: str, arguments: dict[str, Any] | str, key: str = "arguments") -> str:
    """A call as JSON; one that could not be read as it was written."""
    if not name and isinstance(arguments, str):
        return arguments
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def replace_surrogates(text: str) -> str:
    """`text` with "?" for halves of characters, which nobody could write down."""
    return text.encode("utf-8", "replace").decode()


def mark_pattern(call: str) -> re.Pattern[str]:
    """Finds where thoughts begin and end, and where calls begin: what `split_reasoning` goes by."""
    return re.compile(f"{_THINK}|(?P<call>{call})", re.IGNORECASE | re.ASCII)


def split_reasoning(text: str, marked: re.Pattern[str]) -> tuple[str, JsonSource]:
    """The leading thought, with what stands before it, and the rest, in which calls are looked for.

    A thought may have been opened in the prompt: then only its end is here. One that never ends is all there is. An
    end inside a call's own JSON is a string and no end, and a thought that begins after a call is not the leading one.
    """
    source = JsonSource(replace_surrogates(text))
    at, opened, called = 0, -1, False
    while mark := marked.search(source, at):
        at = mark.end()
        if mark.lastgroup == "closing":
            return source[:at], JsonSource(source[at:])
        if mark.lastgroup == "opening":
            if called:
                break
            opened = mark.start() if opened < 0 else opened
        elif opened < 0:
            after = _skip_values(source, at)
            called = called or after > at
            at = max(after, at + (mark.end() == mark.start()))  # a mark may be a place and not a word
    if opened >= 0 and not source[:opened].strip():
        return source[:], JsonSource("")
    return "", source


def _skip_values(source: JsonSource, at: int) -> int:
    """Where the JSON values that begin at `at` end: one a line, or with `;` between them."""
    while found := decode(source, at):
        at = found.end
        following = _NEXT_VALUE.match(source, at)
        if not following:
            break
        at = following.end()
    return at


def collect_calls(
    head: str,
    body: JsonSource,
    opening: re.Pattern[str],
    read: Callable[[JsonSource, int], tuple[Sequence[RawCall], int]],
) -> ParsedReply:
    """Everything in `body` that `read` finds behind an `opening`, as calls; what is left of it, behind `head`."""
    outside: list[str] = []
    calls: list[RawCall] = []
    at = 0
    while mark := opening.search(body, at):
        outside.append(body[at : mark.start()])
        found, at = read(body, mark.end())
        calls.extend(found)
    outside.append(body[at:])
    return head + "".join(outside).strip(), number_calls(calls)
