"""Messages to channels and recipients: thoughts are the reply's reasoning, messages to the user its content."""

from __future__ import annotations

import pytest

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import PARSERS, reasoning_of

ADDED = ToolCall(id="call_0", name="add", arguments={"a": 1})
SAID = ToolCall(id="call_1", name="say", arguments={"text": "<|call|> </think> <|start|>"})
THOUGHT = "<|channel|>analysis<|message|>I could call {} or to=functions.rm.<|end|><|start|>assistant"
ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
SAY = (
    "<|start|>assistant<|channel|>commentary to=functions.say <|constrain|>json<|message|>"
    '{"text": "<|call|> </think> <|start|>"}<|call|>'
)


def test_a_thought_and_calls() -> None:
    reply = PARSERS["gpt_oss"](THOUGHT + ADD + SAY)
    assert reply == ("", [ADDED, SAID])
    assert reasoning_of(reply) == "I could call {} or to=functions.rm."
    assert PARSERS["auto"](THOUGHT + ADD + SAY) == reply


@pytest.mark.parametrize(
    "text",
    [
        ADD,
        ADD.removesuffix("<|call|>"),
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
        '<|channel|>commentary to=add<|message|>{"a": 1}<|end|>',
    ],
)
def test_forms_of_a_call(text: str) -> None:
    assert PARSERS["gpt_oss"](text) == ("", [ADDED])


def test_an_answer_and_a_preamble_are_content() -> None:
    final = "<|channel|>final<|message|>It is 4.<|return|>"
    reply = PARSERS["gpt_oss"](THOUGHT + final)
    assert reply == ("It is 4.", [])
    assert reasoning_of(reply)
    preamble = "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant"
    assert PARSERS["gpt_oss"](preamble + ADD) == ("I will add.", [ADDED])
    assert reasoning_of(PARSERS["gpt_oss"](preamble + ADD)) == ""
    assert PARSERS["gpt_oss"]("Plain text.") == ("Plain text.", [])


def test_a_thought_that_was_cut_off_is_reasoning() -> None:
    reply = PARSERS["gpt_oss"](f"<|channel|>analysis<|message|>so {ADD[:-40]}"[:40])
    assert reply == ("", [])
    assert reasoning_of(reply)


@pytest.mark.parametrize("arguments", ["", "{'a': 1}", "[1]", '{"a": 1'])
def test_a_name_is_known_even_where_its_arguments_are_not(arguments: str) -> None:
    text = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{arguments}<|call|>"
    assert PARSERS["gpt_oss"](text) == ("", [ToolCall(id="call_0", name="add", arguments=arguments)])


def test_muse_glimmer() -> None:
    text = (
        " to=self<|message|>Hm, <atem:function_calls>.<|eom|><|start|>assistant to=add<|message|>"
        "<atem:function_calls>\n"
        '<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
        "<|eom|><|start|>assistant to=user<|message|>Done.<|eot|>"
    )
    reply = PARSERS["muse_glimmer"](text)
    assert reply == ("Done.", [ADDED])
    assert reasoning_of(reply) == "Hm, <atem:function_calls>."
