"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one block a call."""

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

# The next block's opening will do for a closing that was forgotten: the JSON before it is whole.
_ENDING = re.compile(rf"\s*(?:{CLOSING_TAG}|(?=<tool_call>)|\Z)", re.IGNORECASE | re.ASCII)


def parse_hermes(text: str) -> ParsedReply:
    """A block is one JSON object and nothing else; where it is not, the call keeps the block's text."""
    head, body = split_reasoning(text, MARKS)
    return collect_calls(head, body, OPENING, _read_block)


def render_hermes(content: str, calls: Sequence[ToolCall]) -> str:
    return join(content, *(f"<tool_call>\n{dump_call(c.name, c.arguments)}\n</tool_call>" for c in calls))


def read_single_value(source: JsonSource, at: int, found: JsonMatch | None) -> tuple[list[RawCall], int] | None:
    """The call of a block that is made of one JSON value; None where it is made of anything else."""
    if found is None:
        return None
    text = source[at : found.end].strip()
    if ends_in_partial_tag(source, found.end):
        return [to_call(found.value, text)], len(source)
    ending = _ENDING.match(source, found.end)
    return ([to_call(found.value, text)], ending.end()) if ending else None


def ends_in_partial_tag(source: JsonSource, at: int) -> bool:
    """Whether a text ends in the beginning of a closing tag: cut off by length, with the call before it whole."""
    return len(source) - at < 2 * len(CLOSING_TAG) and CLOSING_TAG.startswith(source[at:].strip().lower())


def _read_block(source: JsonSource, at: int) -> tuple[list[RawCall], int]:
    found = decode(source, at)
    whole = read_single_value(source, at, found)
    if whole is not None:
        return whole
    closing = CLOSING.search(source, found.end if found else at)
    end, after = closing.span() if closing else (len(source), len(source))
    return [("", source[at:end].strip())], after
