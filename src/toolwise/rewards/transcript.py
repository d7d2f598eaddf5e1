"""Reads conversations for reward functions: replies, thoughts split from answers, and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from toolwise.messages import Message, ToolCall, as_messages
from toolwise.serialization.json_text import load_json

_OPENING = re.compile(r"<(think|tool_call|response)>")


class Block(NamedTuple):
    """`<tag>inner</tag>`."""

    tag: str
    inner: str


def top_level_blocks(text: str) -> list[Block]:
    """The think, tool_call and response blocks of `text` in order; tags inside a block are plain text."""
    blocks: list[Block] = []
    unclosed: set[str] = set()  # each searched for once: a tag repeated endlessly must not cost quadratic time
    position = 0
    while opening := _OPENING.search(text, position):
        tag, position = opening[1], opening.end()
        if tag in unclosed:
            continue
        if (end := text.find(f"</{tag}>", position)) < 0:
            unclosed.add(tag)
            continue
        blocks.append(Block(tag, text[position:end]))
        position = end + len(tag) + 3
    return blocks


def last_reply(messages: Sequence[Message]) -> str:
    """The assistant's last message including its thought, or an empty string."""
    replies = [m for m in as_messages(messages) if m.role == "assistant"]
    return (replies[-1].content or "") if replies else ""


def replies_to_user(messages: Sequence[Message]) -> list[Message]:
    """The assistant's messages since the last user message."""
    replies: list[Message] = []
    for message in reversed(as_messages(messages)):
        if message.role == "user":
            break
        if message.role == "assistant":
            replies.append(message)
    return replies[::-1]


def split_thought(text: str) -> tuple[str, str]:
    """Splits `text` into the leading thought and what follows it.

    If the chat template opened the thought in the prompt, only its closing tag is in `text`. A thought that is never
    closed takes up the whole text, so there is no answer.
    """
    opened = text.lstrip().startswith("<think>")
    head, closed, tail = text.partition("</think>")
    if closed and (opened or "<think>" not in head):
        return head.replace("<think>", "", 1) if opened else head, tail
    return (text.replace("<think>", "", 1), "") if opened else ("", text)


def final_answer(messages: Sequence[Message]) -> str:
    """The assistant's last message without its thought."""
    return split_thought(last_reply(messages))[1].strip()


def read_tool_calls(message: Message) -> list[ToolCall]:
    """The calls of one message: those that the policy's parser found, or else those in its text."""
    if message.tool_calls:
        return message.tool_calls
    text = message.content or ""
    blocks = [block.inner for block in top_level_blocks(text) if block.tag == "tool_call"]
    calls = [call for block in blocks for call in _read_block(block.strip())]
    _, opened, rest = split_thought(text)[1].rpartition("<tool_call>")
    if opened and "</tool_call>" not in rest:  # cut off: an unreadable call still counts as a call
        calls.append(ToolCall(name="", arguments=rest.strip()))
    return calls


def _read_block(block: str) -> list[ToolCall]:
    """One JSON object over any number of lines, or one per line. An unreadable call keeps its text as arguments."""
    if (call := _read_call(block)) is not None:
        return [call]
    lines = [line for line in block.split("\n") if line.strip()] or [""]  # an empty block counts as one call
    return [_read_call(line) or ToolCall(name="", arguments=line) for line in lines]


def _read_call(text: str) -> ToolCall | None:
    value = load_json(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(name=value["name"], arguments=arguments if isinstance(arguments, dict) else json.dumps(arguments))
