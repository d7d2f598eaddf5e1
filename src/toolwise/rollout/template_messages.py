"""Messages in the form that a chat template expects. Templates disagree on details, which are found by rendering."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

from toolwise.errors import ModelError
from toolwise.messages import Message
from toolwise.rollout.control_tokens import ControlTokens
from toolwise.rollout.tool_prompt import UserToolResult
from toolwise.rollout.turn_ends import CALL, NEXT_MARKER, QUESTION, REPLY, REPLY_MARKER, RESULT


@dataclass(frozen=True, slots=True)
class MessageStyle:
    """What a template needs different from OpenAI's layout with arguments as an object."""

    text_parts: bool = False
    """Content is a list of parts, `[{"type": "text", "text": …}]` (models that also see images)."""
    nine_letter_ids: bool = False
    """Call ids of nine letters and digits (Mistral)."""
    null_content: bool = False
    """No content, rather than an empty one, next to calls (DeepSeek)."""
    json_arguments: bool = False
    """Arguments as a string of JSON (DeepSeek)."""

    def convert(self, message: Message, controls: ControlTokens) -> dict[str, Any]:
        """`message` for a template, without any text that could become a control token."""
        guard, from_tool = controls.guard, message.role == "tool" or isinstance(message, UserToolResult)
        text = guard(message.content or "", tags=from_tool)
        content: Any = [{"type": "text", "text": text}] if self.text_parts else text
        if self.null_content and message.tool_calls and not message.content:
            content = None
        converted: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            converted["tool_calls"] = [
                {
                    "id": self._call_id(c.id, controls),
                    "type": "function",
                    "function": {"name": guard(c.name), "arguments": self._arguments(c.arguments, controls)},
                }
                for c in message.tool_calls
            ]
        if message.reasoning_content is not None:
            converted["reasoning_content"] = guard(message.reasoning_content)
            converted["thinking"] = converted["reasoning_content"]  # gpt-oss
        if message.tool_call_id is not None:
            converted["tool_call_id"] = self._call_id(message.tool_call_id, controls)
        if message.name is not None:
            converted["name"] = guard(message.name)
        return converted

    def _call_id(self, call_id: str, controls: ControlTokens) -> str:
        if self.nine_letter_ids:
            return "".join(c for c in call_id if c.isascii() and c.isalnum())[-9:].rjust(9, "0")
        return controls.guard(call_id)

    def _arguments(self, arguments: dict[str, Any] | str, controls: ControlTokens) -> Any:
        if self.json_arguments and not isinstance(arguments, str):
            return controls.guard(json.dumps(arguments, ensure_ascii=False))
        return controls.guard_all(arguments)


def choose_style(render: Callable[[MessageStyle, Sequence[Message]], str]) -> MessageStyle:
    """The style that differs least from the usual one and with which the template writes replies, calls and results.

    If none shows calls, the calls are written as text later (`ToolPrompt`), and only the reply counts.
    """
    names = [field.name for field in fields(MessageStyle)]
    styles = [MessageStyle(**dict.fromkeys(some, True)) for n in range(4) for some in combinations(names, n)]
    talks = ([QUESTION, REPLY], [QUESTION, CALL, RESULT])
    shown = [{i for i, talk in enumerate(talks) if _shows(render, style, talk)} for style in styles[:1]]
    if shown[0] == {0, 1}:
        return styles[0]
    shown += [{i for i, talk in enumerate(talks) if _shows(render, style, talk)} for style in styles[1:]]
    return max(zip(styles, shown, strict=True), key=lambda pair: (0 in pair[1], len(pair[1])))[0]


def _shows(render: Callable[[MessageStyle, Sequence[Message]], str], style: MessageStyle, talk: list[Message]) -> bool:
    try:
        text = render(style, talk)
    except ModelError:
        return False
    return REPLY_MARKER in text and (len(talk) < 3 or NEXT_MARKER in text)
