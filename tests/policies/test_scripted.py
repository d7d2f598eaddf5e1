"""The scripted policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from toolwise.errors import ConfigError, PolicyError
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.protocols import AgentPolicy

ASKED = Message(role="user", content="?")
ANSWERED = Message(role="assistant", content="!")


def test_it_is_a_policy() -> None:
    assert isinstance(ScriptedPolicy(["a"]), AgentPolicy)


def test_the_line_is_the_one_for_the_turn() -> None:
    policy = ScriptedPolicy(["one", "two"])
    assert asyncio.run(policy.get_action([ASKED])) == ({"type": "text", "content": "one"}, "one", None, None)
    action, raw, _, _ = asyncio.run(policy.get_action([ASKED, ANSWERED, ASKED]))
    assert (action["content"], raw) == ("two", "two")
    assert asyncio.run(policy.get_action([ASKED]))[1] == "one"


def test_lines_are_read_by_the_parser() -> None:
    line = 'Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    action, raw, _, _ = asyncio.run(ScriptedPolicy([line]).get_action([ASKED]))
    call = ToolCall(id="call_0", name="add", arguments={"a": 1})
    assert action == {
        "type": "tool_call",
        "content": "Hm.",
        "name": "add",
        "arguments": {"a": 1},
        "tool_calls": [call],
    }
    assert raw == line


def test_a_function_of_the_messages_will_do() -> None:
    def echo(messages: Sequence[Message]) -> str:
        return f"you said {messages[-1].content}"

    assert asyncio.run(ScriptedPolicy(echo).get_action([ASKED]))[1] == "you said ?"


def test_a_script_that_is_over_says_so() -> None:
    with pytest.raises(PolicyError, match="has 1 lines, but line 2 was requested"):
        asyncio.run(ScriptedPolicy(["one"]).get_action([ASKED, ANSWERED]))


def test_a_parser_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tool parser 'tarot'; choose one of"):
        ScriptedPolicy(["one"], parser="tarot")
