"""Which format? From a chat template once, where there is one (`detect_parser`); else from each text (`parse_auto`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from toolwise.rollout.parsers.action import MARK as ACTION
from toolwise.rollout.parsers.action import parse_action
from toolwise.rollout.parsers.hermes import parse_hermes
from toolwise.rollout.parsers.json_calls import ParsedReply, decode, mark_pattern, split_reasoning
from toolwise.rollout.parsers.llama3 import MARK as LLAMA3
from toolwise.rollout.parsers.llama3 import begins_bare, begins_pythonic, parse_llama3
from toolwise.rollout.parsers.mistral import MARK as MISTRAL
from toolwise.rollout.parsers.mistral import parse_mistral
from toolwise.rollout.parsers.rlla import parse_rlla

_MARKS = mark_pattern(f"<tool_call>|{ACTION}|{MISTRAL}|{LLAMA3}")
_FIRST = re.compile(r"<tool_call>|<action>|\[TOOL_CALLS\]|<\|python_tag\|>", re.IGNORECASE | re.ASCII)
_PARSERS: dict[str, Callable[[str], ParsedReply]] = {
    "<tool_call>": parse_hermes,
    "<action>": parse_action,
    "[tool_calls]": parse_mistral,
    "<|python_tag|>": parse_llama3,
}

_FORMAT_MARKERS = {
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3",
    "<|start_header_id|>": "llama3",
    "<|header_start|>": "llama3",
    "<action>": "action",
}
"""What templates and vocabularies have in them, the surest first: models tuned from Llama keep its tokens."""

_UNSUPPORTED_FORMATS = re.compile(r"<function=|<arg_key>")
"""Formats inside `<tool_call>` that are not JSON (Qwen3-Coder's and GLM's) and that nothing here reads."""


def detect_parser(template: str | Mapping[str, str] | None, tokens: Iterable[str] = ()) -> str:
    """The parser's name for a chat template (or several by name), else for a tokenizer's added tokens.

    "auto" where neither says: then each text is looked at by itself.
    """
    written = template if isinstance(template, str) else "\n".join((template or {}).values())
    if _UNSUPPORTED_FORMATS.search(written):
        return "auto"
    for text in (written, "\n".join(tokens)):
        for sign, name in _FORMAT_MARKERS.items():
            if sign in text:
                return name
    return "auto"


def parse_auto(text: str) -> ParsedReply:
    """As the format whose mark comes first after the thought; a text without any is only stripped."""
    return _format_of(text)(text)


def _format_of(text: str) -> Callable[[str], ParsedReply]:
    if begins_pythonic(text):
        return parse_llama3
    _, body = split_reasoning(text, _MARKS)
    if begins_pythonic(body) or begins_bare(body):
        return parse_llama3
    first = _FIRST.search(body)
    if first is None:
        return parse_hermes
    if first[0].lower() == "<tool_call>":
        found = decode(body, first.end())
        if found and isinstance(found.value, dict) and "arguments" not in found.value:
            return parse_rlla
    return _PARSERS[first[0].lower()]
