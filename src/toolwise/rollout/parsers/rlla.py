"""RLLA (ToolRL): one `<tool_call>` block with a JSON object a line, `{"name": …, "parameters": {…}}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.hermes import CLOSING, CLOSING_TAG, MARKS, OPENING, ends_in_partial_tag, read_single_value
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    ParsedReply,
    RawCall,
    collect_calls,
    decode,
    dump_call,
    join,
    split_reasoning,
    to_call,
)

_BETWEEN = re.compile(r"(?:\s|```(?:json)?)*", re.IGNORECASE)
_LINE_END = re.compile(rf"[ \t\r]*(?=\n|{CLOSING_TAG}|\Z)", re.IGNORECASE | re.ASCII)
_STOP = re.compile(rf"\n|{CLOSING_TAG}", re.IGNORECASE | re.ASCII)


def parse_rlla(text: str) -> ParsedReply:
    """Every line of a block is a call; a line that cannot be read is one that keeps its text, and spoils no other."""
    head, body = split_reasoning(text, MARKS)
    # JSON may run over lines, a call here may not: as many characters, and a value that ends with its line.
    lines = JsonSource(body.replace("\n", "\0"))

    def read(source: JsonSource, at: int) -> tuple[list[RawCall], int]:
        return read_single_value(source, at, decode(source, at)) or _read_lines(source, lines, at)

    return collect_calls(head, body, OPENING, read)


def render_rlla(content: str, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return content
    lines = (dump_call(call.name, call.arguments, key="parameters") for call in calls)
    return join(content, "<tool_call>", *lines, "</tool_call>")


def _read_lines(source: JsonSource, lines: JsonSource, at: int) -> tuple[list[RawCall], int]:
    calls: list[RawCall] = []
    while True:
        between = _BETWEEN.match(source, at)
        at = between.end() if between else at
        closing = CLOSING.match(source, at)
        if closing or ends_in_partial_tag(source, at):
            return calls or [("", "")], closing.end() if closing else len(source)
        found = decode(lines, at)
        if found and (_LINE_END.match(source, found.end) or ends_in_partial_tag(source, found.end)):
            end = found.end
        else:
            stop = _STOP.search(source, found.end if found else at)
            end, found = stop.start() if stop else len(source), None
        calls.append(to_call(found.value if found else None, source[at:end].strip()))
        at = end
