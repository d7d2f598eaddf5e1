"""Arguments between tags. Format only for MiniMax, Seed-OSS and DeepSeek V3.2: no template of theirs is installed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import PARSERS, RENDERERS, parse_for_tools

CODE = "def f(a):\n    return '<b>' + \"</b>\"  # é🦉"
CALLED = [
    ToolCall(id="call_0", name="write", arguments={"code": CODE, "lines": 2, "tags": ["a", {"b": None}]}),
    ToolCall(id="call_1", name="stop", arguments={}),
]
QWEN = (
    f"<tool_call>\n<function=write>\n<parameter=code>\n{CODE}\n</parameter>\n<parameter=lines>\n2\n</parameter>\n"
    '<parameter=tags>\n["a", {"b": null}]\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
)
GLM = (
    f"<tool_call>write\n<arg_key>code</arg_key>\n<arg_value>{CODE}</arg_value>\n<arg_key>lines</arg_key>\n<arg_value>2"
    '</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", {"b": null}]</arg_value>\n</tool_call>\n'
    "<tool_call>stop\n</tool_call>"
)
MINIMAX = (
    f'<minimax:tool_call>\n<invoke name="write">\n<parameter name="code">{CODE}</parameter>\n<parameter name="lines">2'
    '</parameter>\n<parameter name="tags">["a", {"b": null}]</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>\n'
    "</minimax:tool_call>"
)
DSML = (
    f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="code" string="true">{CODE}'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="lines" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="tags" string="false">["a", {"b": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="stop">\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
TEXTS = {
    "qwen3_coder": QWEN,
    "seed_oss": re.sub(r"(<parameter=\w+>)\n|\n(</parameter>)", r"\1\2", QWEN).replace("tool_call>", "seed:tool_call>"),
    "glm": GLM,
    "minimax": MINIMAX,
    "deepseek_v32": DSML,
}


@pytest.mark.parametrize(
    "thought", ["", "<think>or not</think>", "I <tool_call> it.</think>", "<seed:think>a</seed:think>"]
)
@pytest.mark.parametrize("name", TEXTS)
def test_calls(name: str, thought: str) -> None:
    assert PARSERS[name](thought + TEXTS[name]) == (thought, CALLED)
    assert PARSERS["auto"](thought + TEXTS[name]) == (thought, CALLED)
    assert PARSERS[name](f"So: {TEXTS[name]} on")[0].split() == ["So:", "on"]


def parameter(text: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "value", "as_string"),
    [
        ("5", 5, "5"),
        ("-1.50", -1.5, "-1.50"),
        ("true", True, "true"),
        ("True", True, "True"),
        ("null", None, "null"),
        ("None", None, "None"),
        ('{"a":  1}', {"a": 1}, '{"a":  1}'),
        ("[1, 2]", [1, 2], "[1, 2]"),
        ('"5"', "5", "5"),
        ("", "", ""),
        ("NaN", "NaN", "NaN"),
        ("{'a': 1}", "{'a': 1}", "{'a': 1}"),
        ("  two  words ", "  two  words ", "  two  words "),
        ("\nlines\n\n", "\nlines\n\n", "\nlines\n\n"),
        ("a </parameter> b", "a </parameter> b", "a </parameter> b"),
        ("</tool_call> </function>", "</tool_call> </function>", "</tool_call> </function>"),
    ],
)
def test_a_value_is_json_or_text_and_a_schema_may_say_that_it_is_text(text: str, value: Any, as_string: str) -> None:
    assert PARSERS["qwen3_coder"](parameter(text))[1][0].arguments == {"a": value}
    for kind, expected in (("string", as_string), (["string", "null"], value), ("integer", value)):
        schema = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": kind}}}}
        for tool in (schema, {"type": "function", "function": schema}):
            (call,) = parse_for_tools(PARSERS["qwen3_coder"], parameter(text), [tool])[1]
            assert call.arguments == {"a": expected}


@pytest.mark.parametrize(
    "tools", [[{}], [{"function": {}}], [{"function": {"name": "f", "parameters": {"properties": {"a": True}}}}]]
)
def test_tools_without_types_change_nothing(tools: list[dict[str, Any]]) -> None:
    assert parse_for_tools(PARSERS["qwen3_coder"], parameter("5"), tools)[1][0].arguments == {"a": 5}
    assert parse_for_tools(PARSERS["hermes"], "hello", tools) == ("hello", [])


@pytest.mark.parametrize(
    "value", ["5", "true", "None", "", "a\n", "\n", "</parameter>", "<tool_call></think>", '"q"', "é"]
)
@pytest.mark.parametrize("name", TEXTS)
def test_any_string_is_written_so_that_it_is_read_back(name: str, value: str) -> None:
    calls = [ToolCall(id="call_0", name="f", arguments={"a": value, "b": 1})]
    assert PARSERS[name](RENDERERS[name]("", calls)) == ("", calls)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("<tool_call>oops</tool_call>", "", "oops"),
        ("<tool_call>", "", ""),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1", "f", "<parameter=a>\n1"),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>", "f", "<parameter=a>\n1\n</parameter>"),
        ("<tool_call><function=f>a=1</function></tool_call>", "f", "a=1</function>"),
        ('<tool_call>{"name": "f"}</tool_call>', "", '{"name": "f"}'),
    ],
)
def test_what_cannot_be_read_keeps_its_name_and_text(text: str, name: str, arguments: str) -> None:
    assert PARSERS["qwen3_coder"](text) == ("", [ToolCall(id="call_0", name=name, arguments=arguments)])


def test_a_missing_end_of_the_function_is_forgiven() -> None:
    text = parameter("1").replace("</function>\n", "")
    assert PARSERS["qwen3_coder"](text)[1] == [ToolCall(id="call_0", name="f", arguments={"a": 1})]


@pytest.mark.parametrize(
    "text", ["<tool_call>stop", "<tool_call>stop\n", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"]
)
def test_glms_call_that_was_cut_off_may_lack_arguments(text: str) -> None:
    (call,) = PARSERS["glm"](text)[1]
    assert isinstance(call.arguments, str)
