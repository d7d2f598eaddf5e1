"""Reading conversations for rewards."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.messages import Message, ToolCall
from toolwise.rewards.transcript import (
    final_answer,
    last_reply,
    read_tool_calls,
    replies_to_user,
    split_thought,
    top_level_blocks,
)


def talk(*said: tuple[str, str]) -> list[Message]:
    return [Message.model_validate({"role": role, "content": content}) for role, content in said]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", []),
        (
            "<think>a</think><tool_call>b</tool_call> c <response>d</response>",
            [("think", "a"), ("tool_call", "b"), ("response", "d")],
        ),
        ("<think>a <tool_call>b</tool_call></think>", [("think", "a <tool_call>b</tool_call>")]),
        ("<response><think>x</think></response>", [("response", "<think>x</think>")]),
        ("<tool_call>a <tool_call>b</tool_call>", [("tool_call", "a <tool_call>b")]),
        ("<think>a <response>b</response>", [("response", "b")]),
        ("<answer>a</answer></think>", []),
    ],
)
def test_top_level_blocks(text: str, blocks: list[tuple[str, str]]) -> None:
    assert [tuple(block) for block in top_level_blocks(text)] == blocks


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "x"]), max_size=12).map("".join))
def test_blocks_stand_in_the_text_in_order(text: str) -> None:
    place = 0
    for tag, inner in top_level_blocks(text):
        found = text.find(f"<{tag}>{inner}</{tag}>", place)
        assert found >= 0
        assert f"</{tag}>" not in inner
        place = found + len(inner) + 2 * len(tag) + 5


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("hello", "", "hello"),
        ("<think>a</think>b", "a", "b"),
        ("  <think>a</think>b", "  a", "b"),
        ("a</think>b", "a", "b"),
        ("<think>a", "a", ""),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("x <think>a</think>b", "", "x <think>a</think>b"),
        ("", "", ""),
    ],
)
def test_a_thought_is_kept_from_the_answer(text: str, thought: str, answer: str) -> None:
    assert split_thought(text) == (thought, answer)


def test_what_the_assistant_said_last() -> None:
    messages = talk(
        ("user", "?"), ("assistant", "one"), ("tool", "t"), ("assistant", "<think>x</think> two "), ("tool", "u")
    )
    assert last_reply(messages) == "<think>x</think> two "
    assert final_answer(messages) == "two"
    assert last_reply(messages[:1]) == final_answer(messages[:1]) == ""


def test_replies_since_the_user_last_spoke() -> None:
    messages = talk(
        ("user", "?"), ("assistant", "a"), ("user", "!"), ("assistant", "b"), ("tool", "t"), ("assistant", "c")
    )
    assert [m.content for m in replies_to_user(messages)] == ["b", "c"]
    assert replies_to_user([]) == []


def test_calls_as_the_parser_gave_them_come_first() -> None:
    given = ToolCall(name="f", arguments={"a": 1})
    message = Message(role="assistant", content="<tool_call>{}</tool_call>", tool_calls=[given])
    assert read_tool_calls(message) == [given]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("f", {"a": 1})]),
        ('<tool_call>\n{"name": "f", "parameters": {}}\n\n{"name": "g"}\n</tool_call>', [("f", {}), ("g", {})]),
        ('<tool_call>{\n"name": "f",\n"arguments": {}\n}</tool_call>', [("f", {})]),
        ("<tool_call>what?</tool_call>", [("", "what?")]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [("f", "[1]")]),
        ('<think><tool_call>{"name": "f"}</tool_call></think>', []),
        ('<tool_call>{"name": "f", "argu', [("", '{"name": "f", "argu')]),
        ("<tool_call></tool_call>", [("", "")]),
        ("<think>with <tool_call>", []),
        ("prose", []),
    ],
)
def test_calls_in_the_text(text: str, expected: list[tuple[str, object]]) -> None:
    calls = read_tool_calls(Message(role="assistant", content=text))
    assert [(call.name, call.arguments) for call in calls] == expected
