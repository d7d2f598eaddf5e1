"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or, newer, `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    ParsedReply,
    decode,
    dump_call,
    is_storable,
    join,
    need_more,
    skip_values,
    to_call,
)

TAG = "[TOOL_CALLS]"

_NAME = r'[^\s\[\]{}"]+'
_NAMED = rf"\s*{_NAME}\s*(?:\[CALL_ID\]\s*{_NAME}\s*)?(?:\[ARGS\]\s*|(?=\{{))"
_QUOTE_OR_OPENING = re.compile(rf'"|\\.|{re.escape(TAG)}', re.IGNORECASE | re.ASCII | re.DOTALL)
_NAMED_CALL = re.compile(_NAMED, re.IGNORECASE | re.ASCII)
_NAME_ALONE = re.compile(_NAME, re.ASCII)
_FIRST_NAME = re.compile(rf'\s*(?:(?P<named>{_NAME})\s*[\[{{]|(?:\[\s*+)?+\{{\s*"name"\s*:\s*"(?P<name>[^"\\]+)")')


def parse_mistral(text: str) -> ParsedReply:
    """A list that holds anything but calls is one bad call; a named call with bad arguments keeps its name."""
    return MISTRAL.parse(text)


def render_mistral(content: str, calls: Sequence[ToolCall]) -> str:
    """The list form, which every version of the models understands."""
    listed = ", ".join(dump_call(call.name, call.arguments) for call in calls)
    return join(content, f"{TAG} [{listed}]" if calls else "")


def read_mistral(source: JsonSource, start: int) -> Block:
    named = _NAMED_CALL.match(source, start)
    if named:
        return _read_named(source, start, named.end())
    match = decode(source, start)
    if match is None:
        end = _next_call(source, start)
        return Block([("", source[start:end].strip())], end)
    text = source[start : match.end].strip()
    values = match.value if isinstance(match.value, list) and match.value else [match.value]
    calls = [to_call(value, "") for value in values]
    # All or nothing: otherwise a half-wrong list would be repeated in each of its bad calls.
    return Block([("", text)] if ("", "") in calls else calls, match.end)


def _read_named(source: JsonSource, start: int, arguments_start: int) -> Block:
    match = _NAME_ALONE.search(source, start)
    name = match[0] if match else ""
    decoded = decode(source, arguments_start)
    if decoded is None:
        end = _next_call(source, arguments_start)
        return Block([(name, source[arguments_start:end].strip())], end)
    valid = isinstance(decoded.value, dict) and is_storable(decoded.value)
    return Block([(name, decoded.value if valid else source[arguments_start : decoded.end].strip())], decoded.end)


def _next_call(source: JsonSource, start: int) -> int:
    """End of unreadable text. A mark between quotes belongs to a string of the broken call and starts no new one."""
    in_string = False
    for match in _QUOTE_OR_OPENING.finditer(source, start):
        if match[0] == '"':
            in_string = not in_string
        elif match[0][0] == "[" and not in_string:
            return match.start()
    need_more(source)
    return len(source)


def skip_mistral(source: JsonSource, mark: re.Match[str]) -> int:
    named = _NAMED_CALL.match(source, mark.end())
    position = named.end() if named else mark.end()
    end = skip_values(source, position)
    return end if end > position else mark.end()


MISTRAL = BlockFormat({TAG: read_mistral}, ("}", "]"), skip=skip_mistral, name=_FIRST_NAME)
