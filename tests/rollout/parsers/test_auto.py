"""Detecting the format of a template, a vocabulary or a text."""

from __future__ import annotations

from pathlib import Path

import pytest

import toolwise
from toolwise.rollout.parsers import PARSERS, detect_parser, parse_auto

ADD = '"name": "add"'


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n{\"name\": \"' + call.name + '\"' }}", "hermes"),
        ("{{ '<|im_start|>' }}For each call return <tool_call>{{ '<|python_tag|>' }}", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{ '<|start_header_id|>assistant<|end_header_id|>' + '<|python_tag|>' }}", "llama3"),
        ("{{ '<|start_header_id|>' + message.role }}", "llama3"),
        ("{{ '<|header_start|>' + message.role }}", "llama3"),
        ("Answer in the form <action>…</action>", "action"),
        ("{{ '<|im_start|>' + message.role }}", "auto"),
        ("{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' }}", "qwen3_coder"),
        ("{{ '<tool_call>' + name + '\\n<arg_key>' }}", "glm"),
        ("", "auto"),
        (None, "auto"),
        ({"default": "{{ messages }}", "tool_use": "{{ '[TOOL_CALLS]' }}"}, "mistral"),
    ],
)
def test_a_template_tells_the_format(template: str | dict[str, str] | None, name: str) -> None:
    assert detect_parser(template) == name


def test_a_template_is_believed_before_the_vocabulary() -> None:
    assert detect_parser("<tool_call>", ["<|python_tag|>", "[TOOL_CALLS]"]) == "hermes"
    assert detect_parser("{{ messages }}", ["<s>", "[TOOL_CALLS]"]) == "mistral"
    assert detect_parser(None, {"<|eot_id|>": 1, "<|python_tag|>": 2}) == "llama3"
    assert detect_parser(None, ["<s>"]) == "auto"


def test_the_model_that_ships_writes_hermes() -> None:
    template = Path(toolwise.__file__).parent / "models" / "small" / "chat_template.jinja"
    assert detect_parser(template.read_text(encoding="utf-8")) == "hermes"


@pytest.mark.parametrize(
    "text",
    [
        f'<tool_call>{{{ADD}, "arguments": {{}}}}</tool_call>',
        f'<tool_call>\n{{{ADD}, "parameters": {{}}}}\n</tool_call>',
        f'[TOOL_CALLS] [{{{ADD}, "arguments": {{}}}}]',
        "[TOOL_CALLS]add[ARGS]{}",
        f'<|python_tag|>{{{ADD}, "parameters": {{}}}}',
        f'{{{ADD}, "parameters": {{}}}}',
        "[add()]",
        "<|python_tag|>add.call()",
    ],
)
@pytest.mark.parametrize(
    "thought", ["", "<think>[TOOL_CALLS]f[ARGS]{} <action>x</action></think>\n", "<action> or </think>"]
)
def test_a_text_tells_the_format(text: str, thought: str) -> None:
    content, calls = parse_auto(thought + text)
    assert content == thought.strip()
    assert [(c.name, c.arguments) for c in calls] == [("add", {})]


def test_lines_of_calls_are_rllas() -> None:
    lines = [f'{{{ADD}, "parameters": {{"a": {i}}}}}' for i in range(3)]
    assert [c.arguments for c in parse_auto("\n".join(["<tool_call>", *lines, "</tool_call>"]))[1]] == [
        {"a": 0},
        {"a": 1},
        {"a": 2},
    ]


def test_an_action_in_words() -> None:
    assert parse_auto("<think>[TOOL_CALLS]</think>So: <action>go north</action>") == ("go north", [])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "[TOOL_CALLS]g[ARGS]{} <|python_tag|>"}}</tool_call>', "hermes"),
        ('[TOOL_CALLS]f[ARGS]{"a": "<tool_call>{}</tool_call><action>x</action>"}', "mistral"),
        ('{"name": "f", "parameters": {"a": "<tool_call>{}</tool_call>"}}', "llama3"),
        ("<action>write <tool_call>{}</tool_call></action>", "action"),
        ("<tool_call>oops</tool_call> [TOOL_CALLS]f[ARGS]{}", "hermes"),
        ("no calls at all ", "hermes"),
    ],
)
def test_the_mark_that_comes_first_counts(text: str, name: str) -> None:
    assert parse_auto(text) == PARSERS[name](text)
