"""The RLLA text format: required tags, well-formedness, and the last top-level tool_call block."""

from __future__ import annotations

import time
from typing import Any

import pytest

from toolwise.errors import DataError
from toolwise.messages import Message, ToolCall
from toolwise.rewards.library.rlla import first_thought, is_well_formed, read_calls, required_tags, to_rlla_text

TOOLS = frozenset({"tool_call"})
RESPONSE = frozenset({"response"})
BOTH = TOOLS | RESPONSE
NONE: frozenset[str] = frozenset()
CALL = '{"name": "f", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        (f"<think>a</think>\n<tool_call>\n{CALL}\n</tool_call>", TOOLS),
        ("<think>a</think>\n<response>b</response>", RESPONSE),
        (f"<think>a</think>\n<tool_call>\n{CALL}\n</tool_call>\n<response>b</response>", BOTH),
        ("<think>a</think>", NONE),
        ("<think>see <response> and <tool_call></think>", NONE),
        (f"<think>see <response></think>\n<tool_call>\n{CALL}\n</tool_call>", TOOLS),
        ("<think>a</think>\n<response>write <tool_call> around calls</response>", RESPONSE),
    ],
)
def test_the_tags_of_a_gold_answer_and_its_own_form(text: str, tags: frozenset[str]) -> None:
    assert required_tags(text) == tags
    assert is_well_formed(text, tags)
    assert not any(is_well_formed(text, other) for other in {TOOLS, RESPONSE, BOTH, NONE} - {tags})


def test_upstream_s_rule_finds_tags_in_the_thought() -> None:
    text = f"<think>see <response></think>\n<tool_call>\n{CALL}\n</tool_call>"
    assert required_tags(text, literal=True) == BOTH
    assert not is_well_formed(text, BOTH, literal=True)
    assert is_well_formed(text, TOOLS, literal=True)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{CALL}\n</tool_call>",
        f" <think>a</think>\n<tool_call>\n{CALL}\n</tool_call>",
        f"Well, <think>a</think>\n<tool_call>\n{CALL}\n</tool_call>",
        f"<think>a</think>\n<tool_call>\n{CALL}\n</tool_call> done",
        f"<think>a</think> <tool_call>\n{CALL}\n</tool_call>",
        f"<think>a</think>\n\n<tool_call>\n{CALL}\n</tool_call>",
        f"<think>a</think>\n<tool_call>{CALL}</tool_call>",
        f"<think>a</think>\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
        f"<think>a\n<tool_call>\n{CALL}\n</tool_call>",
        f"<think>a</think>\n<think>b</think>\n<tool_call>\n{CALL}\n</tool_call>",
        f"<think>a</think>\n<tool_call>\n{CALL}",
        f"<think>a</think>\n<tool_call>\n<think>b</think>{CALL}\n</tool_call>",
        f"<think>a</think></think>\n<tool_call>\n{CALL}\n</tool_call>",
    ],
)
def test_what_is_not_well_formed(text: str) -> None:
    assert not is_well_formed(text, TOOLS)


@pytest.mark.parametrize("text", ["<think>a</think>\n<response>b", "<think>a</think>\n<tool_call>\n", "<tool_call>"])
def test_a_gold_answer_with_an_open_tag_is_an_error(text: str) -> None:
    with pytest.raises(DataError, match="unclosed tag"):
        required_tags(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<tool_call>{"name": "a", "parameters": {}}</tool_call>', ["a"]),
        ('<tool_call>\n{"name": "a", "parameters": {}}\n{"name": "b", "parameters": {}}\n</tool_call>', ["a", "b"]),
        (
            '<tool_call>no</tool_call>\n<tool_call>{"name": "b", "parameters": {}}</tool_call>',
            ["b"],
        ),
        ('<think><tool_call>no</tool_call></think><tool_call>{"name": "a", "parameters": {}}</tool_call>', ["a"]),
        ('<tool_call>{"name": "a", "parameters": {}}</tool_call><think><tool_call>no</tool_call></think>', ["a"]),
        ('<tool_call>{"name": "a", "parameters": {}}</tool_call><response><tool_call>no</tool_call></response>', ["a"]),
        ('<think>never closed <tool_call>{"name": "a", "parameters": {}}</tool_call>', ["a"]),
        ('<tool_call>{"name": "a\u2028b", "parameters": {}}</tool_call>', ["a\u2028b"]),
        (
            '<tool_call>\r\n{"name": "a", "parameters": {}}\r\n{"name": "b", "parameters": {}}\r\n</tool_call>',
            ["a", "b"],
        ),
    ],
)
def test_the_last_top_level_block_is_read(text: str, names: list[str]) -> None:
    assert [call["name"] for call in read_calls(text)] == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<think><tool_call>{}</tool_call></think>",
        "<tool_call>",
        "<tool_call>1</tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_calls_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError):
        read_calls(text)


@pytest.mark.parametrize("tag", ["<think>", "<tool_call>", "</think>", "<think></think>", "<tool_call></tool_call>\n"])
def test_a_model_that_repeats_itself_does_not_cost_the_earth(tag: str) -> None:
    text, began = tag * 50_000, time.process_time()
    for tags in (TOOLS, RESPONSE, BOTH, NONE):
        is_well_formed(text, tags)
        is_well_formed(text, tags, literal=True)
    with pytest.raises(ValueError):
        read_calls(text)
    assert time.process_time() - began < 2


def test_the_thought() -> None:
    assert first_thought("<think> a <think> b </think> c </think>") == " a <think> b "
    assert first_thought("<think> a") is None
    assert first_thought("a </think>") is None


@pytest.mark.parametrize(
    ("content", "calls", "expected"),
    [
        ("plain <tool_call>x</tool_call>", None, "plain <tool_call>x</tool_call>"),
        (None, None, ""),
        (
            "<think>a</think>",
            [("f", {"x": "é"})],
            '<think>a</think>\n<tool_call>\n{"name": "f", "parameters": {"x": "é"}}\n</tool_call>',
        ),
        (
            "<think>a</think><response>b</response>",
            [("f", {})],
            f"<think>a</think>\n<tool_call>\n{CALL}\n</tool_call>\n<response>b</response>",
        ),
        (None, [("f", {}), ("", "rubbish")], f"<tool_call>\n{CALL}\nrubbish\n</tool_call>"),
        ("", [("f", "rubbish")], '<tool_call>\n{"name": "f", "parameters": "rubbish"}\n</tool_call>'),
    ],
)
def test_a_message_in_rlla_s_own_form(content: str | None, calls: list[tuple[str, Any]] | None, expected: str) -> None:
    given = [ToolCall(name=name, arguments=arguments) for name, arguments in calls or ()] or None
    assert to_rlla_text(Message(role="assistant", content=content, tool_calls=given)) == expected
