"""A conversation as rewards read it: what the assistant said, its thoughts apart from its answer, and its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from toolwise.messages import Message, ToolCall, as_messages

_OPENING = re.compile(r"<(think|tool_call|response)>")


class Block(NamedTuple):
    """`<tag>inner</tag>`."""

    tag: str
    inner: str


def top_level_blocks(text: str) -> list[Block]:
    """The think, tool_call and response blocks of `text` in order; a tag named inside a block is only text."""
    found: list[Block] = []
    unclosed: set[str] = set()  # looked for once each: a model that repeats one tag for ever must not cost a square
    place = 0
    while opening := _OPENING.search(text, place):
        tag, place = opening[1], opening.end()
        if tag in unclosed:
            continue
        end = text.find(f"</{tag}>", place)
        if end < 0:
            unclosed.add(tag)
            continue
        found.append(Block(tag, text[place:end]))
        place = end + len(tag) + 3
    return found


def last_reply(messages: Sequence[Message]) -> str:
    """What the assistant wrote last, its thought included; empty where it wrote nothing."""
    replies = [m for m in as_messages(messages) if m.role == "assistant"]
    return (replies[-1].content or "") if replies else ""


def replies_to_user(messages: Sequence[Message]) -> list[Message]:
    """The assistant's messages since the user last spoke."""
    found: list[Message] = []
    for message in reversed(as_messages(messages)):
        if message.role == "user":
            break
        if message.role == "assistant":
            found.append(message)
    return found[::-1]


def split_thought(text: str) -> tuple[str, str]:
    """The leading thought and what follows it.

    A template may have opened the thought in the prompt: then only its end is here. A thought that never ends is all
    there is: such a text holds no answer.
    """
    opened = text.lstrip().startswith("<think>")
    head, closed, tail = text.partition("</think>")
    if closed and (opened or "<think>" not in head):
        return head.replace("<think>", "", 1) if opened else head, tail
    return (text.replace("<think>", "", 1), "") if opened else ("", text)


def final_answer(messages: Sequence[Message]) -> str:
    """What the assistant wrote last, without its thought."""
    return split_thought(last_reply(messages))[1].strip()


def read_tool_calls(message: Message) -> list[ToolCall]:
    """The calls of one message: as the policy's parser gave them, else those that stand in its text."""
    if message.tool_calls:
        return message.tool_calls
    text = message.content or ""
    blocks = [block.inner.strip() for block in top_level_blocks(text) if block.tag == "tool_call"]
    calls = [call for block in blocks for call in _read_block(block)]
    _, opened, rest = split_thought(text)[1].rpartition("<tool_call>")
    if opened and "</tool_call>" not in rest:  # it was cut off: a call that nobody can read is still a call
        calls.append(ToolCall(name="", arguments=rest.strip()))
    return calls


def _read_block(block: str) -> list[ToolCall]:
    """One JSON object, however many lines it takes, or one a line; what cannot be read keeps its text."""
    whole = _read_call(block)
    if whole is not None:
        return [whole]
    lines = [line for line in block.split("\n") if line.strip()] or [""]  # an empty block is a call of nothing
    return [_read_call(line) or ToolCall(name="", arguments=line) for line in lines]


def _read_call(text: str) -> ToolCall | None:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(name=value["name"], arguments=arguments if isinstance(arguments, dict) else json.dumps(arguments))
