"""Llama 3: `{"name": …, "parameters": {…}}`, bare or after `<|python_tag|>`, several separated by `;`.

Also the `[f(a=1), g()]` of its later versions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    ParsedReply,
    RawCall,
    decode,
    dump_call,
    join,
    mark_pattern,
    number_calls,
    replace_surrogates,
    split_reasoning,
    to_call,
)
from toolwise.rollout.parsers.python_calls import GEMMA3, read_python

TAG = "<|python_tag|>"
MARK = r"<\|python_tag\|>|\A\s*(?=\{|```)"
"""Includes the start of a text, where a call needs no mark."""

_TAG = re.compile(re.escape(TAG), re.IGNORECASE | re.ASCII)
_MARKS = mark_pattern(MARK)
_END_OF_TURN = re.compile(r"<\|(?:eom|eot)_id\|>\s*+\Z")
"""Removed from the text: the policy may know only one of Llama's two."""
_OBJECT = re.compile(r"\s*(?:```\w*\s*)?\{")
_BROKEN_CALL = re.compile(r'\s*(?:```\w*\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
PYTHONIC = re.compile(r"\s*\[\s*[\w.]+\(\s*(?:\)|\w+\s*=)")
_SEPARATOR = re.compile(r"\s*+(?:(?:;|<\|python_tag\|>)\s*+)*+(?=\{)|\s*+;", re.IGNORECASE | re.ASCII)


def parse_llama3(text: str) -> ParsedReply:
    """Bare calls are read only at the start of a reply: JSON in the middle of a sentence is an example."""
    text = _END_OF_TURN.sub("", replace_surrogates(text))
    # Text that starts as a list of calls is not a thought, whatever its strings contain.
    head, body = ("", JsonSource(text)) if PYTHONIC.match(text) else split_reasoning(text, _MARKS)
    if PYTHONIC.match(body):
        return head, number_calls(read_python(body.strip()))
    if begins_bare(body):
        calls, end = _read_objects(body, 0)
        return head + body[end:].strip(), number_calls(calls)
    tag = _TAG.search(body)
    if tag is None:
        return head + body.strip(), []
    calls, end = _read_tagged(body, tag.end())
    return head + (body[: tag.start()] + body[end:]).strip(), number_calls(calls)


def render_llama3(content: str, calls: Sequence[ToolCall]) -> str:
    objects = "; ".join(dump_call(call.name, call.arguments, key="parameters") for call in calls)
    bare = not calls or (not content and begins_bare(JsonSource(objects)))
    return join(content, objects if bare else TAG + objects)


def begins_bare(body: JsonSource) -> bool:
    """Whether a reply starts with a call: a complete one, or one that breaks after its name.

    A complete object with a name may be an answer about a person; with arguments as well it is a call.
    """
    if not _OBJECT.match(body):
        return False
    match = decode(body, 0)
    if match is None:
        return _BROKEN_CALL.match(body) is not None
    keys = match.value.keys()
    return "name" in keys and ("parameters" in keys or "arguments" in keys)


def _read_tagged(source: JsonSource, start: int) -> tuple[list[RawCall], int]:
    if _OBJECT.match(source, start):
        return _read_objects(source, start)
    # Llama's built-in tools: brave_search.call(query="…")
    calls = read_python(source[start:].strip())
    return [(name.removesuffix(".call"), arguments) for name, arguments in calls], len(source)


def _read_objects(source: JsonSource, position: int) -> tuple[list[RawCall], int]:
    calls: list[RawCall] = []
    while True:
        match = decode(source, position)
        if match is None:
            if rest := source[position:].strip():
                calls.append(("", rest))
            return calls, len(source)
        calls.append(to_call(match.value, source[position : match.end].strip()))
        separator = _SEPARATOR.match(source, match.end)
        if separator is None:
            return calls, match.end
        position = separator.end()


LLAMA3 = BlockFormat(
    {TAG: lambda source, start: Block(*_read_tagged(source, start))},
    ("}", ")"),
    dropped=("<|eom_id|>", "<|eot_id|>"),
    starts=("{", "[", "`"),
    streams=False,
)


def parse_gemma3(text: str) -> ParsedReply:
    """Calls in a code fence named `tool_code`, or Llama's bare forms, which Google's documentation shows too."""
    return GEMMA3_BLOCKS.parse(text) if GEMMA3.opening in text else parse_llama3(text)


GEMMA3_BLOCKS = replace(GEMMA3.block_format(), starts=LLAMA3.starts, dropped=(), streams=False)
