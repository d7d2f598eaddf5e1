"""RLLA (ToolRL): one `<tool_call>` block with one JSON object per line, `{"name": …, "parameters": {…}}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat, Closing
from toolwise.rollout.parsers.hermes import CLOSING_TAG, JSON_NAME, OPENING_TAG, read_hermes, read_single_value
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    ParsedReply,
    RawCall,
    decode,
    dump_call,
    join,
    split_reasoning,
    to_call,
)

_CLOSING = Closing(CLOSING_TAG)
_BETWEEN = re.compile(r"(?:\s|```(?:json)?)*", re.IGNORECASE)
_LINE_END = re.compile(rf"[ \t\r]*(?=\n|{CLOSING_TAG}|\Z)", re.IGNORECASE | re.ASCII)
_STOP = re.compile(rf"\n|{CLOSING_TAG}", re.IGNORECASE | re.ASCII)

RLLA = BlockFormat({OPENING_TAG: read_hermes}, (CLOSING_TAG,), name=JSON_NAME, streams=False)


def parse_rlla(text: str) -> ParsedReply:
    """Every line of a block is a call; one that cannot be parsed keeps its text and does not affect the others."""
    head, body = split_reasoning(text, RLLA.marks)
    # JSON may span lines, but a call here may not: replace newlines, so that a value must end with its line.
    lines = JsonSource(body.replace("\n", "\0"))

    def read(source: JsonSource, start: int) -> Block:
        return read_single_value(source, start, decode(source, start)) or _read_lines(source, lines, start)

    return BlockFormat({OPENING_TAG: read}, (CLOSING_TAG,)).collect(head, body)


def render_rlla(content: str, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return content
    lines = (dump_call(call.name, call.arguments, key="parameters") for call in calls)
    return join(content, "<tool_call>", *lines, "</tool_call>")


def _read_lines(source: JsonSource, single_lines: JsonSource, position: int) -> Block:
    calls: list[RawCall] = []
    while True:
        between = _BETWEEN.match(source, position)
        position = between.end() if between else position
        end = _CLOSING.match(source, position)
        if end is not None:
            return Block(calls or [("", "")], end)
        match = decode(single_lines, position)
        if match and (_LINE_END.match(source, match.end) or _CLOSING.match(source, match.end) is not None):
            end = match.end
        else:
            stop = _STOP.search(source, match.end if match else position)
            end, match = stop.start() if stop else len(source), None
        calls.append(to_call(match.value if match else None, source[position:end].strip()))
        position = end
