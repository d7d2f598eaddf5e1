"""The form of messages that a template needs, chosen by rendering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer

from toolwise.errors import ModelError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.template_messages import MessageStyle, choose_style

CALLING = Message(
    role="assistant", content="", tool_calls=[ToolCall(id="call_0", name="look_up", arguments={"word": "字"})]
)


def convert(style: MessageStyle, message: Message = CALLING) -> dict[str, Any]:
    return style.convert(message, chat_tokenizer("chatml").controls)


def test_the_usual_style_is_openais_with_arguments_as_an_object() -> None:
    converted = convert(MessageStyle())
    assert converted["content"] == ""
    assert converted["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"word": "字"}}


def test_each_difference_changes_one_thing() -> None:
    said = Message(role="user", content="hm")
    assert convert(MessageStyle(text_parts=True), said)["content"] == [{"type": "text", "text": "hm"}]
    assert convert(MessageStyle(null_content=True))["content"] is None
    assert convert(MessageStyle(null_content=True), said)["content"] == "hm"
    assert convert(MessageStyle(nine_letter_ids=True))["tool_calls"][0]["id"] == "0000call0"
    arguments = convert(MessageStyle(json_arguments=True))["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"word": "字"}'


@pytest.mark.parametrize(
    "needed",
    [MessageStyle(), MessageStyle(text_parts=True), MessageStyle(null_content=True, json_arguments=True)],
)
def test_the_style_with_the_fewest_differences_that_shows_everything_is_chosen(needed: MessageStyle) -> None:
    def render(style: MessageStyle, messages: Sequence[Message]) -> str:
        if style != needed:
            raise ModelError("not like this")
        return " ".join(f"{m.content} {m.tool_calls}" for m in messages)

    assert choose_style(render) == needed


def test_without_a_style_that_shows_calls_replies_decide() -> None:
    def render(style: MessageStyle, messages: Sequence[Message]) -> str:
        return " ".join(m.content or "" for m in messages) if style.text_parts else ""

    assert choose_style(render) == MessageStyle(text_parts=True)
