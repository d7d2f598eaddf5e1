"""Calls as Python code. Format only for Olmo 3, SmolLM3 and Gemma 3: no template with such calls is installed."""

from __future__ import annotations

import pytest

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import PARSERS

ADDED = ToolCall(id="call_0", name="add", arguments={"a": 1})
SAID = ToolCall(
    id="call_1", name="say.loud", arguments={"text": "it's </think> ``` </code>", "deep": {"x": [True, None]}}
)
SAY = "say.loud(text='it\\'s </think> ``` </code>', deep={\"x\": [true, None]})"


@pytest.mark.parametrize("thought", ["", "<think>[add(a=2)]</think>"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", f"<|tool_call_start|>[add(a=1), {SAY}]<|tool_call_end|>"),
        ("olmo3", f"<function_calls>\nadd(a=1)\n{SAY}\n</function_calls>"),
        ("olmo3", f"<function_calls>add(a=1)\n{SAY}</function_calls>"),
        ("smollm3", f"<code>\nadd(a=1)\nprint({SAY})\n</code>"),
        ("gemma3", f"```tool_code\nprint(add(a=1))\n{SAY}\n```"),
        ("gemma3", f"[add(a=1), {SAY}]"),
    ],
)
def test_calls(name: str, text: str, thought: str) -> None:
    assert PARSERS[name](thought + text) == (thought, [ADDED, SAID])


def test_smollm3_also_writes_hermes_blocks() -> None:
    block = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert PARSERS["smollm3"](f"{block}<code>{SAY}</code>") == ("", [ADDED, SAID])


def test_lfm2_may_write_json() -> None:
    text = '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}]<|tool_call_end|>'
    assert PARSERS["lfm2"](text) == ("", [ADDED])


@pytest.mark.parametrize(
    "code", ["x = 3", "add(1)", "add(a=b)", "[add(a=1)", "import os", "add(a={1})", "", "'", "f(a=f())"]
)
def test_other_code_is_a_bad_call_and_never_run(code: str) -> None:
    assert PARSERS["lfm2"](f"so <|tool_call_start|>{code}<|tool_call_end|>") == (
        "so",
        [ToolCall(id="call_0", name="", arguments=code)],
    )


def test_code_that_was_cut_off_is_a_bad_call() -> None:
    assert PARSERS["olmo3"]("<function_calls>\nadd(a=") == ("", [ToolCall(id="call_0", name="", arguments="add(a=")])
