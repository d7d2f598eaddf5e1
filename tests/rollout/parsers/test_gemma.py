"""Gemma's notation. Format only for FunctionGemma: its template is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import PARSERS


def gemma4(arguments: str) -> str:
    return f"<|tool_call>call:f{arguments}<tool_call|>"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{}", {}),
        ('{city:<|"|>Oslo<|"|>,days:3}', {"city": "Oslo", "days": 3}),
        ('{ city : <|"|>Oslo<|"|> , days: -1.5 }', {"city": "Oslo", "days": -1.5}),
        ('{a:<|"|>{x:[1]}, <tool_call|> "é🦉"\n<|"|>}', {"a": '{x:[1]}, <tool_call|> "é🦉"\n'}),
        ('{a:{b:[true,null,{c:<|"|><|"|>}],d:[]},e:{}}', {"a": {"b": [True, None, {"c": ""}], "d": []}, "e": {}}),
        ('{<|"|>a b<|"|>:word}', {"a b": "word"}),
        ("{a:None}", {"a": None}),
    ],
)
def test_arguments(written: str, arguments: dict[str, Any]) -> None:
    called = [ToolCall(id="call_0", name="f", arguments=arguments)]
    assert PARSERS["gemma4"](gemma4(written)) == ("", called)
    assert PARSERS["auto"](gemma4(written)) == ("", called)
    if "<tool_call|>" not in written:
        text = f"<start_function_call>call:f{written}<end_function_call>".replace('<|"|>', "<escape>")
        assert PARSERS["functiongemma"](f"{text}<start_function_response>") == ("", called)


def test_several_calls_after_a_thought_and_text() -> None:
    thought = "<|channel>thought\nor <|tool_call>call:g{}<tool_call|>\n<channel|>"
    text = f"{thought}So: {gemma4('{a:1}')}{gemma4('{a:2}')}<|tool_response>"
    content, calls = PARSERS["gemma4"](text)
    assert content == f"{thought}So:"
    assert [call.arguments for call in calls] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    "written", ["{", "{a}", "{a:}", '{a:<|"|>x}', "{a:1", "{a:[1}", "{a:1} or", "{a:" + "[" * 200 + "}", "{a:1e999}"]
)
def test_what_cannot_be_read_keeps_its_name_and_text(written: str) -> None:
    assert PARSERS["gemma4"](gemma4(written)) == ("", [ToolCall(id="call_0", name="f", arguments=written)])


@pytest.mark.parametrize("text", ["oops", "f{}", ""])
def test_a_block_that_is_no_call_keeps_its_text(text: str) -> None:
    parsed = PARSERS["gemma4"](f"<|tool_call>{text}<tool_call|>")
    assert parsed == ("", [ToolCall(id="call_0", name="", arguments=text)])
