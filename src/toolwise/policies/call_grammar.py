"""A grammar for replies with well-formed tool calls: free text, and calls to available tools that match their schemas.

For the format of hermes, Qwen and the bundled model: <tool_call>{"name": …, "arguments": {…}}</tool_call>.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolwise.engine.grammar import WHITE_SPACE, Grammar

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# Lenient: what llguidance cannot enforce of a schema is left to the tool, which validates its arguments anyway.
_OPTIONS = {"whitespace_pattern": WHITE_SPACE, "lenient": True}
_JSON_OPTIONS = {"whitespace_pattern": WHITE_SPACE}


def calls_grammar(
    tokenizer: Any,
    specs: Sequence[dict[str, Any]],
    *,
    required: bool = False,
    parallel: bool = True,
    answer: dict[str, Any] | None = None,
) -> Grammar:
    """Build a Lark grammar from tools in OpenAI's format. Text may contain anything but the start of another call.

    `required`: nothing but calls. `answer`: either calls, or JSON that follows this schema. With one of the two,
    `parallel` allows more than one call.
    """
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    # llguidance treats tags such as <think> as tokens, not text; tokens that only a template writes are left out.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    tags = [
        f"<[{number}]>" for text, number in added.items() if number not in special and text not in (OPENING, CLOSING)
    ]
    tagged = "(TEXT? tag)*" if tags else ""
    are_tokens = OPENING in added and CLOSING in added
    if required or answer is not None:
        tags, start = [], _only_calls(are_tokens, parallel, answer)
    elif are_tokens:
        start = [f"start: {tagged} TEXT? ({OPENING} call {CLOSING} {tagged} TEXT?)*"]
    else:
        start = [f'start: ({tagged} opened call "{CLOSING}")* {tagged} TEXT?', f"opened[lazy]: /(?s:.*){OPENING}/"]
    lines = [
        *start,
        *([f"tag: {' | '.join(tags)}"] if tags else []),
        *([] if required or answer is not None else [f"TEXT: /(?s:.+)/ & ~/(?s:.*){OPENING}(?s:.*)/"]),
        f"call: GAP ({' | '.join(f'call_{number}' for number in range(len(specs)))}) GAP",
        r"GAP: /\n?/",
        *(f"call_{number}: {_call(spec['function'])}" for number, spec in enumerate(specs)),
    ]
    return Grammar.lark("\n".join(lines) + "\n", "the grammar of tool calls")


def _only_calls(are_tokens: bool, parallel: bool, answer: dict[str, Any] | None) -> list[str]:
    one = "opening call closing"
    rules = [
        "start: calls" if answer is None else "start: calls | json_answer",
        f"calls: {one} (GAP {one})*" if parallel else f"calls: {one}",
        f"opening: {OPENING if are_tokens else json.dumps(OPENING)}",
        f"closing: {CLOSING if are_tokens else json.dumps(CLOSING)}",
    ]
    if answer is not None:
        rules.append(f"json_answer: %json {json.dumps({'x-guidance': _JSON_OPTIONS} | answer)}")
    return rules


def _call(function: dict[str, Any]) -> str:
    schema = {"type": "object", "x-guidance": _OPTIONS, **(function.get("parameters") or {})}
    prefix = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
    return f'{json.dumps(prefix, ensure_ascii=False)} %json {json.dumps(schema)} "}}"'
