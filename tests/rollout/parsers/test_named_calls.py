"""A name, then JSON, between marks. Format only for Kimi K2 and DeepSeek V3.1: no template of theirs is installed."""

from __future__ import annotations

import pytest

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import PARSERS

ADDED = ToolCall(id="call_0", name="add", arguments={"a": 1})
SAID = ToolCall(id="call_1", name="say", arguments={"text": "</think> <｜tool▁call▁end｜><|tool_call_end|>"})
SAY = '{"text": "</think> <｜tool▁call▁end｜><|tool_call_end|>"}'
V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n```json\n{SAY}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    f"<｜tool▁call▁begin｜>say<｜tool▁sep｜>{SAY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    "<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    f"<|tool_call_begin|>functions.say:1<|tool_call_argument_begin|>{SAY}<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize("thought", ["", "<think>or not</think>", f"I could {V3.replace('</think>', '')}.</think>"])
@pytest.mark.parametrize(
    ("name", "text"),
    [("deepseek_v3", V3), ("deepseek_v31", V31), ("deepseek_v3", V31), ("deepseek_v31", V3), ("kimi_k2", KIMI)],
)
def test_calls(name: str, text: str, thought: str) -> None:
    assert PARSERS[name](thought + text) == (thought, [ADDED, SAID])
    assert PARSERS["auto"](thought + text) == (thought, [ADDED, SAID])


def test_a_tool_may_be_called_function() -> None:
    text = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    assert PARSERS["deepseek_v31"](text) == ("", [ToolCall(id="call_0", name="function", arguments={})])


def test_kimis_names_lose_their_prefix_and_index() -> None:
    written = ["functions.a.b:12", "a:1", "functions.c", "d"]
    text = "".join(f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for name in written)
    assert [call.name for call in PARSERS["kimi_k2"](text)[1]] == ["a.b", "a", "c", "d"]


@pytest.mark.parametrize("arguments", ["", "{'a': 1}", '{"a": 1', "[1]", '{"a": NaN}', '{"a": 1} or'])
def test_a_name_is_known_even_where_its_arguments_are_not(arguments: str) -> None:
    text = f"<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|> on"
    assert PARSERS["kimi_k2"](text) == ("on", [ToolCall(id="call_0", name="add", arguments=arguments)])


@pytest.mark.parametrize("cut", [1, 5, 20, 30])
def test_a_call_without_its_closing_mark_is_complete_if_its_arguments_are(cut: int) -> None:
    assert PARSERS["deepseek_v31"](V31[:-cut])[1] == [ADDED, SAID]
