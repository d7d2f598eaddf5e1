"""Llama 3's calls: JSON, bare or after a tag, and lists of Python calls."""

from __future__ import annotations

import pytest

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import parse_llama3, render_llama3

ADD = '{"name": "add", "parameters": {"a": 1}}'
SAY = '{"name": "say", "parameters": {"text": "; <|python_tag|>{} </think>"}}'
ADDED = ToolCall(id="call_0", name="add", arguments={"a": 1})
SAID = ToolCall(id="call_1", name="say", arguments={"text": "; <|python_tag|>{} </think>"})


@pytest.mark.parametrize("tag", ["", "<|python_tag|>", " \n<|python_tag|> ", "<|PYTHON_TAG|>"])
@pytest.mark.parametrize("end", ["", "<|eom_id|>", "<|eot_id|>\n", ";"])
def test_one_call(tag: str, end: str) -> None:
    assert parse_llama3(f"{tag}{ADD}{end}") == ("", [ADDED])


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
@pytest.mark.parametrize("between", [";", " ; ", "\n", "", ";\n<|python_tag|>"])
def test_several_calls(tag: str, between: str) -> None:
    assert parse_llama3(f"{tag}{ADD}{between}{SAY}") == ("", [ADDED, SAID])


def test_text_before_the_tag_is_content() -> None:
    assert parse_llama3(f"Let me see. <|python_tag|>{ADD}") == ("Let me see.", [ADDED])


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_text_after_the_calls_is_content(tag: str) -> None:
    assert parse_llama3(f"{tag}{ADD}\nThis adds.") == ("This adds.", [ADDED])


def test_arguments_will_do_for_parameters() -> None:
    assert parse_llama3('{"type": "function", "name": "add", "arguments": {"a": 1}}') == ("", [ADDED])
    assert parse_llama3('{"parameters": {"a": 1}, "name": "add"}') == ("", [ADDED])


def test_a_code_fence_around_a_bare_call_is_passed_over() -> None:
    assert parse_llama3(f"```json\n{ADD}\n```") == ("", [ADDED])
    assert parse_llama3('```\n{"name": "add", "parameters": {"a": "</think>"}}\n```')[1][0].name == "add"


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Ada", "born": 1815}',
        "{x} is a set",
        "[1, 2, 3]",
        "[see](http://example.org)",
        "[note(s)] are here",
        f"You would write {ADD} to add.",
        '{"answer": {"name": "add", "parameters": {}}}',
    ],
)
def test_an_answer_that_looks_like_json_is_an_answer(text: str) -> None:
    assert parse_llama3(text) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "parameters": {"a": 1}',
        '{"name": "add", "para',
        '{"name":',
        '{"type": "function", "name": "add", "parameters": {"a": }}',
        '{"name": 3, "parameters": {}}',
        '{"name": "add", "parameters": {"a": NaN}}',
    ],
)
@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_a_call_that_cannot_be_read_keeps_its_text(tag: str, text: str) -> None:
    assert parse_llama3(tag + text) == ("", [ToolCall(id="call_0", name="", arguments=text)])


def test_a_bad_call_after_a_good_one() -> None:
    assert parse_llama3(f'{ADD}; {{"name": "say", "param') == (
        "",
        [ADDED, ToolCall(id="call_1", name="", arguments='{"name": "say", "param')],
    )


def test_a_python_list_of_calls() -> None:
    text = '[add(a=1), say(text="</think> ]", n=-2.5, deep={"x": [True, None, (1, 2)]}), stop()]'
    content, calls = parse_llama3(text)
    assert content == ""
    assert [(c.id, c.name, c.arguments) for c in calls] == [
        ("call_0", "add", {"a": 1}),
        ("call_1", "say", {"text": "</think> ]", "n": -2.5, "deep": {"x": [True, None, [1, 2]]}}),
        ("call_2", "stop", {}),
    ]


def test_a_python_list_after_a_thought() -> None:
    assert parse_llama3("<think>[add(a=2)]</think>\n[add(a=1)]<|eot_id|>") == ("<think>[add(a=2)]</think>", [ADDED])


@pytest.mark.parametrize(
    "text",
    ["[add(a=1", "[add(a=x)]", "[add(a=1, a=2)]", "[add(a={1})]", "[add(a=1e999)]", '[add(a="\\ud800")]', "[f(a=f())]"],
)
def test_a_python_list_that_cannot_be_read_keeps_its_text(text: str) -> None:
    assert parse_llama3(text) == ("", [ToolCall(id="call_0", name="", arguments=text)])


def test_built_in_tools_are_called_in_python() -> None:
    assert parse_llama3('<|python_tag|>brave_search.call(query="owls")<|eom_id|>') == (
        "",
        [ToolCall(id="call_0", name="brave_search", arguments={"query": "owls"})],
    )


@pytest.mark.parametrize("code", ["print(1)", "x = 3", "3 + 4", "[]", ""])
def test_code_behind_the_tag_is_a_bad_call(code: str) -> None:
    assert parse_llama3(f"<|python_tag|>{code}") == ("", [ToolCall(id="call_0", name="", arguments=code)])


def test_rendering_is_bare_where_it_can_be_read_so() -> None:
    assert render_llama3("", [ADDED]) == ADD
    assert render_llama3("", [ADDED, SAID]) == f"{ADD}; {SAY}"
    assert render_llama3("So:", [ADDED]) == f"So:\n<|python_tag|>{ADD}"
    assert render_llama3("", [ToolCall(name="", arguments="oops")]) == "<|python_tag|>oops"
