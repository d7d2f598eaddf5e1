"""Lists of calls as JSON behind a mark. Format only: no template of these models is installed."""

from __future__ import annotations

import pytest

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import PARSERS, open_stream
from toolwise.rollout.parsers.stream import CallFinished, StreamEvent

ADDED = ToolCall(id="call_0", name="add", arguments={"a": 1})
SAID = ToolCall(id="call_1", name="say", arguments={"text": "</think> <|/tool_call|>"})
ADD, SAY = '"add", "arguments": {"a": 1}', '"say", "arguments": {"text": "</think> <|/tool_call|>"}'
LIST = f'[{{"name": {ADD}}}, {{"name": {SAY}}}]'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", f"<|tool_call|>{LIST}"),
        ("granite", f"<|tool_call|> {LIST}\n"),
        ("phi4", f"<|tool_call|>{LIST}<|/tool_call|>"),
        ("phi4", f"functools{LIST}"),
        ("hunyuan", f"<tool_calls>\n{LIST}\n</tool_calls>"),
        ("hunyuan", f"<tool_calls>{LIST}"),
        ("nemotron", f"<TOOLCALL>{LIST}</TOOLCALL>"),
        (
            "cohere",
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}},\n    '
            '{"tool_call_id": "1", "tool_name": "say", "parameters": {"text": "</think> <|/tool_call|>"}}\n]'
            "<|END_ACTION|>",
        ),
        (
            "internlm",
            f'<|action_start|><|plugin|>\n{{"name": "add", "parameters": {{"a": 1}}}}<|action_end|>\n'
            f'<|action_start|><|plugin|>{{"name": {SAY}}}<|action_end|>',
        ),
    ],
)
def test_calls(name: str, text: str) -> None:
    assert PARSERS[name](text) == ("", [ADDED, SAID])
    assert PARSERS[name](f"So. {text}") == ("So.", [ADDED, SAID])
    assert PARSERS["auto"](text) == ("", [ADDED, SAID])


def test_coheres_thoughts_and_answers_have_marks() -> None:
    thought = "<|START_THINKING|>or <|START_ACTION|>[]<|END_ACTION|>?<|END_THINKING|>"
    action = '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>'
    assert PARSERS["cohere"](thought + action) == (thought, [ADDED])
    assert PARSERS["cohere"](f"{thought}<|START_RESPONSE|>It is 4.<|END_RESPONSE|>") == (f"{thought}It is 4.", [])


@pytest.mark.parametrize("text", ["", "[]", "oops", "[1]", '[{"name": "add"', '[{"name": 3}]', f"{LIST} or"])
def test_what_cannot_be_read_keeps_its_text(text: str) -> None:
    parsed = PARSERS["hunyuan"](f"so <tool_calls>{text}</tool_calls> on")
    assert parsed == ("so  on", [ToolCall(id="call_0", name="", arguments=text)])


def test_functools_is_a_word_where_no_list_of_calls_follows() -> None:
    assert PARSERS["phi4"]("use functools[cache] or functools.") == ("use functools[cache] or functools.", [])
    assert PARSERS["phi4"]('functools[{"name": "add", "argu') == (
        "",
        [ToolCall(id="call_0", name="", arguments='[{"name": "add", "argu')],
    )
    two = f"functools{LIST} and functools{LIST} there."
    assert PARSERS["phi4"](two)[0] == "and  there."
    assert [c.name for c in PARSERS["phi4"](two)[1]] == ["add", "say", "add", "say"]


def test_functools_is_read_as_it_arrives() -> None:
    stream, events = open_stream("phi4", thought_open=False), list[StreamEvent]()
    for letter in f"So. functools{LIST}":
        events += stream.feed(letter)
    assert [event for event in events if isinstance(event, CallFinished)] == [
        CallFinished(0, ADDED),
        CallFinished(1, SAID),
    ]
    stream.finish()
    assert stream.reply == ("So.", [ADDED, SAID])


def test_text_after_granites_list_is_content() -> None:
    assert PARSERS["granite"](f"<|tool_call|>{LIST} there.") == ("there.", [ADDED, SAID])
