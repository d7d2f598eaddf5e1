"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and the newer `[TOOL_CALLS]name[ARGS]{…}`, one a call."""

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
    """A list with anything else in it is one bad call; of a named call the name is known even where it is a bad one."""
    head, body = split_reasoning(text, _MARKS)
    return collect_calls(head, body, _OPENING, _read)


def render_mistral(content: str, calls: Sequence[ToolCall]) -> str:
    """The list form, which every version of the models reads."""
    listed = ", ".join(dump_call(call.name, call.arguments) for call in calls)
    return join(content, f"{TAG} [{listed}]" if calls else "")


def _read(source: JsonSource, at: int) -> tuple[list[RawCall], int]:
    named = _NAMED_CALL.match(source, at)
    if named:
        return _read_named(source, at, named.end())
    found = decode(source, at)
    if found is None:
        end = _next_call(source, at)
        return [("", source[at:end].strip())], end
    text = source[at : found.end].strip()
    values = found.value if isinstance(found.value, list) and found.value else [found.value]
    calls = [to_call(value, "") for value in values]
    # All or nothing: a list that is half wrong would otherwise stand once in each of its bad calls.
    return [("", text)] if ("", "") in calls else calls, found.end


def _read_named(source: JsonSource, at: int, arguments_at: int) -> tuple[list[RawCall], int]:
    match = _NAME_ALONE.search(source, at)
    name = match[0] if match else ""
    found = decode(source, arguments_at)
    if found is None:
        end = _next_call(source, arguments_at)
        return [(name, source[arguments_at:end].strip())], end
    whole = isinstance(found.value, dict) and is_storable(found.value)
    return [(name, found.value if whole else source[arguments_at : found.end].strip())], found.end


def _next_call(source: JsonSource, at: int) -> int:
    """Where what cannot be read ends. A mark between quotes is a broken call's own string, and no call to make."""
    inside = False
    for step in _QUOTE_OR_OPENING.finditer(source, at):
        if step[0] == '"':
            inside = not inside
        elif step[0][0] == "[" and not inside:
            return step.start()
    return len(source)
