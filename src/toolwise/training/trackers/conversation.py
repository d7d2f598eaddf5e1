"""Conversations for display: their turns, and text that is safe to print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolwise.terminal import escape_controls


@dataclass(frozen=True, slots=True)
class Turn:
    """One entry of a conversation; an assistant message with text and two calls gives three."""

    kind: Literal["system", "user", "assistant", "call", "result"]
    text: str
    name: str = ""
    """The tool, for a call or a result."""
    assistant_index: int | None = None
    """Index of the assistant message it belongs to, for text and calls of the assistant."""


def clean_text(value: object) -> str:
    """Text that can be written to any UTF-8 output: control characters and lone surrogates are escaped."""
    return escape_controls("" if value is None else value)


def shorten(text: str, limit: int) -> str:
    """One line of at most `limit` characters; longer text keeps its beginning and end."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    tail = (limit - 3) // 3
    return f"{text[: limit - 3 - tail]} … {text[len(text) - tail :]}"


def conversation_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Turns of a conversation in OpenAI's format; malformed parts are shown as they are."""
    turns: list[Turn] = []
    tools: dict[str, str] = {}
    assistant_index = -1
    for message in messages:
        role, text = message.get("role"), clean_text(_content(message.get("content")))
        if role == "tool":
            name = message.get("name") or tools.get(str(message.get("tool_call_id")), "")
            turns.append(Turn("result", text, clean_text(name)))
        elif role == "assistant":
            assistant_index += 1
            if text.strip():
                turns.append(Turn("assistant", text, assistant_index=assistant_index))
            for call in message.get("tool_calls") or ():
                name, shown = _call(call)
                tools[str(call.get("id")) if isinstance(call, Mapping) else ""] = name
                turns.append(Turn("call", shown, name, assistant_index))
        else:
            turns.append(Turn("user" if role == "user" else "system", text))
    return turns


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(p.get("text", "")) if isinstance(p, Mapping) else str(p) for p in content)
    return "" if content is None else str(content)


def _call(call: Any) -> tuple[str, str]:
    """The tool's name, and the call as source code."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", clean_text(call)
    name, arguments = clean_text(function.get("name")), function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(parsed, Mapping):
            pairs = (f"{k}={json.dumps(v, ensure_ascii=False, default=str)}" for k, v in parsed.items())
            return name, f"{name}({clean_text(', '.join(pairs))})"
    except (ValueError, RecursionError):
        pass
    return name, f"{name}({clean_text(arguments)})"
