"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one block per call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat, Closing
from toolwise.rollout.parsers.json_calls import (
    JsonMatch,
    JsonSource,
    ParsedReply,
    decode,
    dump_call,
    join,
    to_call,
)

OPENING_TAG, CLOSING_TAG = "<tool_call>", "</tool_call>"
JSON_NAME = re.compile(r'\s*+(?:```\w*\s*+)?+[\[{\s]*+"name"\s*:\s*"(?P<name>[^"\\]+)"')

# The opening tag of the next block also ends a block whose closing tag is missing: the JSON before it is complete.
_AFTER_VALUE = Closing(CLOSING_TAG, (OPENING_TAG,))
_CLOSING = Closing(CLOSING_TAG)


def read_hermes(source: JsonSource, start: int) -> Block:
    match = decode(source, start)
    return read_single_value(source, start, match) or _CLOSING.bad(source, start, match.end if match else start)


def read_single_value(source: JsonSource, start: int, match: JsonMatch | None) -> Block | None:
    """The call in a block that consists of a single JSON value; None for any other block."""
    end = _AFTER_VALUE.match(source, match.end) if match else None
    if match is None or end is None:
        return None
    return Block([to_call(match.value, source[start : match.end].strip())], end)


HERMES = BlockFormat({OPENING_TAG: read_hermes}, (CLOSING_TAG,), name=JSON_NAME)


def parse_hermes(text: str) -> ParsedReply:
    """A block must be one JSON object and nothing else; otherwise the call keeps the text of the block."""
    return HERMES.parse(text)


def render_hermes(content: str, calls: Sequence[ToolCall]) -> str:
    return join(content, *(f"{OPENING_TAG}\n{dump_call(c.name, c.arguments)}\n{CLOSING_TAG}" for c in calls))
