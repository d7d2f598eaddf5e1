"""Parsers for tool calls in model output: one small module per format, chosen by name from `PARSERS`.

A parser accepts any text and never raises: a call that cannot be parsed keeps its text as its arguments, so that the
model sees an error and the failure is counted. A renderer does the reverse: parse(render(content, calls)) returns the
content and the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.action import parse_action, render_action
from toolwise.rollout.parsers.auto import detect_parser, parse_auto
from toolwise.rollout.parsers.hermes import parse_hermes, render_hermes
from toolwise.rollout.parsers.json_calls import ParsedReply
from toolwise.rollout.parsers.llama3 import parse_llama3, render_llama3
from toolwise.rollout.parsers.mistral import parse_mistral, render_mistral
from toolwise.rollout.parsers.plain_text import parse_plain_text
from toolwise.rollout.parsers.rlla import parse_rlla, render_rlla

__all__ = [
    "PARSERS",
    "RENDERERS",
    "ParsedReply",
    "detect_parser",
    "parse_action",
    "parse_auto",
    "parse_hermes",
    "parse_llama3",
    "parse_mistral",
    "parse_plain_text",
    "parse_rlla",
    "render_action",
    "render_hermes",
    "render_llama3",
    "render_mistral",
    "render_rlla",
    "to_action",
]

PARSERS: dict[str, Callable[[str], ParsedReply]] = {
    "auto": parse_auto,
    "hermes": parse_hermes,
    "qwen": parse_hermes,
    "llama3": parse_llama3,
    "mistral": parse_mistral,
    "rlla": parse_rlla,
    "action": parse_action,
    "openai": parse_plain_text,
    "none": parse_plain_text,
}
"""The names accepted by `rollout.tool_parser`."""

RENDERERS: dict[str, Callable[[str, Sequence[ToolCall]], str]] = {
    "hermes": render_hermes,
    "qwen": render_hermes,
    "llama3": render_llama3,
    "mistral": render_mistral,
    "rlla": render_rlla,
    "action": render_action,
}


def to_action(content: str, calls: list[ToolCall], reasoning: str = "") -> dict[str, Any]:
    """The action dictionary that policies pass to environments. `reasoning`: thoughts that are not in `content`."""
    reasoning_field = {"reasoning_content": reasoning} if reasoning else {}
    if not calls:
        return {"type": "text", "content": content, **reasoning_field}
    first = calls[0]
    return {
        "type": "tool_call",
        "content": content,
        "name": first.name,
        "arguments": first.arguments,
        "tool_calls": calls,
        **reasoning_field,
    }
