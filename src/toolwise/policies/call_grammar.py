"""Tool calls that cannot be malformed: free text, and calls of the tools on offer with arguments as their schemas say.

For the form of hermes and Qwen (and of the model that ships): <tool_call>{"name": …, "arguments": {…}}</tool_call>.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolwise.engine.grammar import WHITE_SPACE, Grammar

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# What a schema asks beyond what llguidance can hold a reply to is left to the tool, which checks its arguments anyway.
_OPTIONS = {"whitespace_pattern": WHITE_SPACE, "lenient": True}


def calls_grammar(tokenizer: Any, specs: Sequence[dict[str, Any]]) -> Grammar:
    """Tools as OpenAI describes them -> a Lark grammar. Text may hold anything but the beginning of another call."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    # Tags such as <think> are tokens and no text for llguidance; those that only a template writes are left out.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    tags = [
        f"<[{number}]>" for text, number in added.items() if number not in special and text not in (OPENING, CLOSING)
    ]
    tagged = "(TEXT? tag)*" if tags else ""
    if OPENING in added and CLOSING in added:
        start = [f"start: {tagged} TEXT? ({OPENING} call {CLOSING} {tagged} TEXT?)*"]
    else:
        start = [f'start: ({tagged} opened call "{CLOSING}")* {tagged} TEXT?', f"opened[lazy]: /(?s:.*){OPENING}/"]
    lines = [
        *start,
        *([f"tag: {' | '.join(tags)}"] if tags else []),
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){OPENING}(?s:.*)/",
        f"call: GAP ({' | '.join(f'call_{number}' for number in range(len(specs)))}) GAP",
        r"GAP: /\n?/",
        *(f"call_{number}: {_call(spec['function'])}" for number, spec in enumerate(specs)),
    ]
    return Grammar.lark("\n".join(lines) + "\n", "the grammar of tool calls")


def _call(function: dict[str, Any]) -> str:
    schema = {"type": "object", "x-guidance": _OPTIONS, **(function.get("parameters") or {})}
    before = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
    return f'{json.dumps(before, ensure_ascii=False)} %json {json.dumps(schema)} "}}"'
