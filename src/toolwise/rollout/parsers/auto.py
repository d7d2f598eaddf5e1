"""Detects the tool-call format: once from a chat template (`detect_parser`), or from each text (`parse_auto`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from toolwise.rollout.parsers.action import MARK as ACTION
from toolwise.rollout.parsers.action import parse_action
from toolwise.rollout.parsers.hermes import parse_hermes
from toolwise.rollout.parsers.json_calls import ParsedReply, decode, mark_pattern, split_reasoning
from toolwise.rollout.parsers.llama3 import MARK as LLAMA3
from toolwise.rollout.parsers.llama3 import PYTHONIC, begins_bare, parse_llama3
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
"""Markers in templates and vocabularies, most reliable first: models fine-tuned from Llama keep its tokens."""

_UNSUPPORTED_FORMATS = re.compile(r"<function=|<arg_key>")
"""Formats inside `<tool_call>` that are not JSON (Qwen3-Coder's and GLM's) and that no parser here reads."""


def detect_parser(template: str | Mapping[str, str] | None, tokens: Iterable[str] = ()) -> str:
    """The parser's name for a chat template (or several by name), else for a tokenizer's added tokens.

    "auto" if neither tells: each text is then inspected separately.
    """
    template_text = template if isinstance(template, str) else "\n".join((template or {}).values())
    if _UNSUPPORTED_FORMATS.search(template_text):
        return "auto"
    for text in (template_text, "\n".join(tokens)):
        for marker, name in _FORMAT_MARKERS.items():
            if marker in text:
                return name
    return "auto"


def parse_auto(text: str) -> ParsedReply:
    """Parse as the format whose mark comes first after the thought; text without a mark is only stripped."""
    return _format_of(text)(text)


def _format_of(text: str) -> Callable[[str], ParsedReply]:
    if PYTHONIC.match(text):
        return parse_llama3
    _, body = split_reasoning(text, _MARKS)
    if PYTHONIC.match(body) or begins_bare(body):
        return parse_llama3
    first = _FIRST.search(body)
    if first is None:
        return parse_hermes
    if first[0].lower() == "<tool_call>":
        match = decode(body, first.end())
        if match and isinstance(match.value, dict) and "arguments" not in match.value:
            return parse_rlla
    return _PARSERS[first[0].lower()]
