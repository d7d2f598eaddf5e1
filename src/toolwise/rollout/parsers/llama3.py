"""Llama 3: `{"name": …, "parameters": {…}}`, bare or behind `<|python_tag|>`, several with `;` between them.

Also what its later versions write: `[f(a=1), g()]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rewards.library.call_syntax import parse_python_calls
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    ParsedReply,
    RawCall,
    decode,
    dump_call,
    is_storable,
    join,
    mark_pattern,
    number_calls,
    replace_surrogates,
    split_reasoning,
    to_call,
)

TAG = "<|python_tag|>"
MARK = r"<\|python_tag\|>|\A\s*(?=\{|```)"

_TAG = re.compile(re.escape(TAG), re.IGNORECASE | re.ASCII)
_MARKS = mark_pattern(MARK)
_ENDS_OF_TURN = ("<|eom_id|>", "<|eot_id|>")
_OBJECT = re.compile(r"\s*(?:```\w*\s*)?\{")
_BROKEN_CALL = re.compile(r'\s*(?:```\w*\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_PYTHONIC = re.compile(r"\s*\[\s*[\w.]+\(\s*(?:\)|\w+\s*=)")
_SEPARATOR = re.compile(r"\s*+(?:(?:;|<\|python_tag\|>)\s*+)*+(?=\{)|\s*+;", re.IGNORECASE | re.ASCII)


def parse_llama3(text: str) -> ParsedReply:
    """Bare calls are read only where a reply begins with them: JSON in the middle of a sentence is an example."""
    text = _cut_end_of_turn(replace_surrogates(text))
    # What begins as a list of calls is no thought, whatever its strings say.
    head, body = ("", JsonSource(text)) if _PYTHONIC.match(text) else split_reasoning(text, _MARKS)
    if _PYTHONIC.match(body):
        return head, number_calls(_read_python(body.strip()))
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
    """Whether a reply begins with a call: a whole one, or one that was spoilt after its name.

    A whole object with a name may be an answer about somebody; one with arguments as well is a call.
    """
    if not _OBJECT.match(body):
        return False
    found = decode(body, 0)
    if found is None:
        return _BROKEN_CALL.match(body) is not None
    keys = found.value.keys()
    return "name" in keys and ("parameters" in keys or "arguments" in keys)


def begins_pythonic(body: str) -> bool:
    return _PYTHONIC.match(body) is not None


def _cut_end_of_turn(text: str) -> str:
    """A policy takes off the token that ended a turn; of Llama's two it may know only one."""
    ending = next((end for end in _ENDS_OF_TURN if text.rstrip().endswith(end)), None)
    return text.rstrip().removesuffix(ending) if ending else text


def _read_tagged(source: JsonSource, at: int) -> tuple[list[RawCall], int]:
    if _OBJECT.match(source, at):
        return _read_objects(source, at)
    # Llama's built-in tools: brave_search.call(query="…")
    calls = _read_python(source[at:].strip())
    return [(name.removesuffix(".call"), arguments) for name, arguments in calls], len(source)


def _read_objects(source: JsonSource, at: int) -> tuple[list[RawCall], int]:
    calls: list[RawCall] = []
    while True:
        found = decode(source, at)
        if found is None:
            if rest := source[at:].strip():
                calls.append(("", rest))
            return calls, len(source)
        calls.append(to_call(found.value, source[at : found.end].strip()))
        separator = _SEPARATOR.match(source, found.end)
        if separator is None:
            return calls, found.end
        at = separator.end()


def _read_python(code: str) -> list[RawCall]:
    try:
        return [(call.name, _to_json_arguments(call)) for call in parse_python_calls(code)] or [("", code)]
    except (ValueError, TypeError, RecursionError):  # TypeError: a literal that is no JSON, such as a set
        return [("", code)]


def _to_json_arguments(call: ToolCall) -> dict[str, object]:
    """The arguments as JSON has them: tuples become lists, keys strings."""
    arguments: dict[str, object] = json.loads(json.dumps(call.arguments, allow_nan=False))
    if not is_storable(arguments):
        raise ValueError("the arguments cannot be kept")
    return arguments
