"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one block per call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.json_calls import (
    JsonMatch,
    JsonSource,
    ParsedReply,
    RawCall,
    collect_calls,
    decode,
    dump_call,
    join,
    mark_pattern,
    split_reasoning,
    to_call,
)

CLOSING_TAG = "</tool_call>"
OPENING = re.compile("<tool_call>", re.IGNORECASE | re.ASCII)
CLOSING = re.compile(CLOSING_TAG, re.IGNORECASE | re.ASCII)
MARKS = mark_pattern("<tool_call>")

# The opening tag of the next block also ends a block whose closing tag is missing: the JSON before it is complete.
_ENDING = re.compile(rf"\s*(?:{CLOSING_TAG}|(?=<tool_call>)|\Z)", re.IGNORECASE | re.ASCII)


def parse_hermes(text: str) -> ParsedReply:
    """A block must be one JSON object and nothing else; otherwise the call keeps the text of the block."""
    head, body = split_reasoning(text, MARKS)
    return collect_calls(head, body, OPENING, _read_block)


def render_hermes(content: str, calls: Sequence[ToolCall]) -> str:
    return join(content, *(f"<tool_call>\n{dump_call(c.name, c.arguments)}\n</tool_call>" for c in calls))


def read_single_value(source: JsonSource, start: int, match: JsonMatch | None) -> tuple[list[RawCall], int] | None:
    """The call in a block that consists of a single JSON value; None for any other block."""
    if match is None:
        return None
    text = source[start : match.end].strip()
    if ends_in_partial_tag(source, match.end):
        return [to_call(match.value, text)], len(source)
    ending = _ENDING.match(source, match.end)
    return ([to_call(match.value, text)], ending.end()) if ending else None


def ends_in_partial_tag(source: JsonSource, start: int) -> bool:
    """Whether the text ends in a partial closing tag: cut off by length, with the call before it complete."""
    return len(source) - start < 2 * len(CLOSING_TAG) and CLOSING_TAG.startswith(source[start:].strip().lower())


def _read_block(source: JsonSource, start: int) -> tuple[list[RawCall], int]:
    match = decode(source, start)
    single = read_single_value(source, start, match)
    if single is not None:
        return single
    closing = CLOSING.search(source, match.end if match else start)
    end, after = closing.span() if closing else (len(source), len(source))
    return [("", source[start:end].strip())], after
