"""What a policy wrote -> what it decided. One function a format, chosen by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from toolwise.messages import ToolCall

Parsed = tuple[str, list[ToolCall]]
"""The text beside the calls, and the calls. A call that cannot be read keeps its text as its arguments."""

_THOUGHT = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_HERMES_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_hermes(text: str) -> Parsed:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one block a call; a leading thought is not searched."""
    thought = _THOUGHT.match(text)
    head, body = (text[: thought.end()], text[thought.end() :]) if thought else ("", text)
    calls = [_read_call(block.strip(), index) for index, block in enumerate(_HERMES_BLOCK.findall(body))]
    return head + _HERMES_BLOCK.sub("", body).strip(), calls


def _read_call(block: str, index: int) -> ToolCall:
    unreadable = ToolCall(id=f"call_{index}", name="", arguments=block)
    try:
        value: Any = json.loads(block)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # also numbers too long to read, and halves of characters
        return unreadable
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return unreadable
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=f"call_{index}", name=value["name"], arguments=arguments)


def parse_none(text: str) -> Parsed:
    """Text is text: for tasks whose calls are only ever read by the reward, such as RLLA's."""
    return text, []


PARSERS: dict[str, Callable[[str], Parsed]] = {"hermes": parse_hermes, "none": parse_none}


def to_action(content: str, calls: list[ToolCall]) -> dict[str, Any]:
    """The action dictionary that policies hand to environments."""
    if not calls:
        return {"type": "text", "content": content}
    first = calls[0]
    return {
        "type": "tool_call",
        "content": content,
        "name": first.name,
        "arguments": first.arguments,
        "tool_calls": calls,
    }
