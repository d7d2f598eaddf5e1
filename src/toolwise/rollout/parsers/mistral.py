"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or, newer, `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    ParsedReply,
    RawCall,
    collect_calls,
    decode,
    dump_call,
    is_storable,
    join,
    mark_pattern,
    split_reasoning,
    to_call,
)

TAG = "[TOOL_CALLS]"

_NAME = r'[^\s\[\]{}"]+'
_NAMED = rf"\s*{_NAME}\s*(?:\[CALL_ID\]\s*{_NAME}\s*)?(?:\[ARGS\]\s*|(?=\{{))"
MARK = rf"\[TOOL_CALLS\](?:{_NAMED})?"

_OPENING = re.compile(re.escape(TAG), re.IGNORECASE | re.ASCII)
_QUOTE_OR_OPENING = re.compile(rf'"|\\.|{re.escape(TAG)}', re.IGNORECASE | re.ASCII | re.DOTALL)
_NAMED_CALL = re.compile(_NAMED, re.IGNORECASE | re.ASCII)
_NAME_ALONE = re.compile(_NAME, re.ASCII)
_MARKS = mark_pattern(MARK)


def parse_mistral(text: str) -> ParsedReply:
    """A list that holds anything but calls is one bad call; a named call with bad arguments keeps its name."""
    head, body = split_reasoning(text, _MARKS)
    return collect_calls(head, body, _OPENING, _read)


def render_mistral(content: str, calls: Sequence[ToolCall]) -> str:
    """The list form, which every version of the models understands."""
    listed = ", ".join(dump_call(call.name, call.arguments) for call in calls)
    return join(content, f"{TAG} [{listed}]" if calls else "")


def _read(source: JsonSource, start: int) -> tuple[list[RawCall], int]:
    named = _NAMED_CALL.match(source, start)
    if named:
        return _read_named(source, start, named.end())
    match = decode(source, start)
    if match is None:
        end = _next_call(source, start)
        return [("", source[start:end].strip())], end
    text = source[start : match.end].strip()
    values = match.value if isinstance(match.value, list) and match.value else [match.value]
    calls = [to_call(value, "") for value in values]
    # All or nothing: otherwise a half-wrong list would be repeated in each of its bad calls.
    return [("", text)] if ("", "") in calls else calls, match.end


def _read_named(source: JsonSource, start: int, arguments_start: int) -> tuple[list[RawCall], int]:
    match = _NAME_ALONE.search(source, start)
    name = match[0] if match else ""
    decoded = decode(source, arguments_start)
    if decoded is None:
        end = _next_call(source, arguments_start)
        return [(name, source[arguments_start:end].strip())], end
    valid = isinstance(decoded.value, dict) and is_storable(decoded.value)
    return [(name, decoded.value if valid else source[arguments_start : decoded.end].strip())], decoded.end


def _next_call(source: JsonSource, start: int) -> int:
    """End of unreadable text. A mark between quotes belongs to a string of the broken call and starts no new one."""
    in_string = False
    for match in _QUOTE_OR_OPENING.finditer(source, start):
        if match[0] == '"':
            in_string = not in_string
        elif match[0][0] == "[" and not in_string:
            return match.start()
    return len(source)
