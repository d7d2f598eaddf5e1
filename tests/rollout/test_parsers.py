"""The table of tool-call formats, and the action built from a parsed reply."""

from __future__ import annotations

import pytest

from toolwise.config.rollout import TOOL_PARSERS, RolloutConfig
from toolwise.messages import ToolCall
from toolwise.rollout.parsers import PARSERS, RENDERERS, parse_hermes, to_action


def test_a_text_action() -> None:
    assert to_action("hello", []) == {"type": "text", "content": "hello"}


def test_a_tool_action_names_its_first_call_and_has_them_all() -> None:
    calls = [ToolCall(name="a", arguments={"x": 1}), ToolCall(name="b", arguments="bad")]
    assert to_action("say", calls) == {
        "type": "tool_call",
        "content": "say",
        "name": "a",
        "arguments": {"x": 1},
        "tool_calls": calls,
    }


def test_parsers_are_chosen_by_name() -> None:
    assert PARSERS["hermes"] is parse_hermes


def test_without_a_parser_text_is_left_as_it_is() -> None:
    text = '<think>so</think>\n<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>'
    assert PARSERS["none"](text) == (text, [])


def test_qwen_is_another_name_for_hermes() -> None:
    assert PARSERS["qwen"] is parse_hermes
    assert RENDERERS["qwen"] is RENDERERS["hermes"]


def test_the_configuration_takes_the_names_in_the_table() -> None:
    assert set(TOOL_PARSERS) == set(PARSERS)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_each_name_makes_a_run(name: str) -> None:
    assert RolloutConfig(tool_parser=name).tool_parser == name


def test_what_can_be_written_can_be_read() -> None:
    assert set(RENDERERS) <= set(PARSERS)
