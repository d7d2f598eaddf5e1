"""Hermes and Qwen: one JSON object per block. Any model output is parsed, kept or reported, without a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import parse_hermes, render_hermes, to_action


def block(value: Any) -> str:
    return f"<tool_call>{json.dumps(value, ensure_ascii=False)}</tool_call>"


def call(name: str, **arguments: Any) -> str:
    return block({"name": name, "arguments": arguments})


def test_plain_text_has_no_calls() -> None:
    assert parse_hermes("The answer is 42.") == ("The answer is 42.", [])


def test_one_call() -> None:
    assert parse_hermes(call("add", a=1)) == ("", [ToolCall(id="call_0", name="add", arguments={"a": 1})])


def test_newlines_around_the_json_do_not_matter() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert parse_hermes(text) == parse_hermes(call("add", a=1))


def test_several_calls_keep_their_order_and_have_ids_of_their_own() -> None:
    text = f"First {call('add', a=1)} then {call('search', q='x')}\n{call('add', a=2)} done"
    content, calls = parse_hermes(text)
    assert [(c.id, c.name, c.arguments) for c in calls] == [
        ("call_0", "add", {"a": 1}),
        ("call_1", "search", {"q": "x"}),
        ("call_2", "add", {"a": 2}),
    ]
    assert content == "First  then \n done"


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "add(1, 2)",
        '{"name": "add", "arguments": {"a": 1}',
        "{'name': 'add', 'arguments': {}}",
        "[1, 2]",
        '"add"',
        "null",
        '{"arguments": {"a": 1}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "\\udfff", "arguments": {}}',
        '{"a":' * 5000,
    ],
)
def test_a_call_that_cannot_be_read_keeps_its_text(inside: str) -> None:
    content, calls = parse_hermes(f"so: <tool_call>{inside}</tool_call>")
    assert content == "so:"
    assert calls == [ToolCall(id="call_0", name="", arguments=inside)]


def test_a_bad_call_does_not_take_a_good_one_with_it() -> None:
    _, calls = parse_hermes(f"<tool_call>oops</tool_call>{call('add', a=1)}")
    assert [c.arguments for c in calls] == ["oops", {"a": 1}]


def test_a_call_cut_off_in_the_middle_is_kept_as_unreadable() -> None:
    assert parse_hermes('Let me see. <tool_call>{"name": "add", "argu') == (
        "Let me see.",
        [ToolCall(id="call_0", name="", arguments='{"name": "add", "argu')],
    )


def test_a_whole_call_without_its_closing_tag_is_read() -> None:
    assert parse_hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}')[1][0].arguments == {"a": 1}


def test_nested_braces_and_brackets() -> None:
    arguments = {"deep": {"er": [{"and": {"er": "}{]["}}]}}
    assert parse_hermes(call("f", **arguments))[1][0].arguments == arguments


def test_unicode_raw_and_escaped() -> None:
    raw = parse_hermes('<tool_call>{"name": "суммa", "arguments": {"q": "naïve 🦉"}}</tool_call>')
    escaped = parse_hermes('<tool_call>{"name": "суммa", "arguments": {"q": "na\\u00efve \\ud83e\\udd89"}}</tool_call>')
    assert raw == escaped
    assert raw[1][0].arguments == {"q": "naïve 🦉"}


def test_a_leading_thought_may_mention_the_tag() -> None:
    thought = f"<think>I could write <tool_call> or even {call('rm', path='/')} but no.</think>"
    assert parse_hermes(f"{thought}\nIt is 4.") == (f"{thought}It is 4.", [])
    content, calls = parse_hermes(f"  {thought}\n{call('add', a=1)}")
    assert content == f"  {thought}"
    assert [c.name for c in calls] == ["add"]


def test_only_the_leading_thought_is_passed_over() -> None:
    text = f"<think>a</think>{call('add', a=1)}<think>{call('add', a=2)}</think>"
    assert [c.arguments for c in parse_hermes(text)[1]] == [{"a": 1}, {"a": 2}]


def test_parameters_will_do_for_arguments() -> None:
    assert parse_hermes(block({"name": "f", "parameters": {"x": 1}}))[1][0].arguments == {"x": 1}
    assert parse_hermes(block({"name": "f", "arguments": {"x": 1}, "parameters": {"y": 2}}))[1][0].arguments == {"x": 1}


def test_no_arguments_are_an_empty_object() -> None:
    assert parse_hermes(block({"name": "f"}))[1] == [ToolCall(id="call_0", name="f", arguments={})]


@pytest.mark.parametrize(
    ("arguments", "kept"), [([1, 2], "[1, 2]"), (3, "3"), (None, "null"), (True, "true"), ("1+1", "1+1")]
)
def test_arguments_that_are_no_object_are_kept_as_text(arguments: Any, kept: str) -> None:
    assert parse_hermes(block({"name": "f", "arguments": arguments}))[1] == [
        ToolCall(id="call_0", name="f", arguments=kept)
    ]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
arguments = st.dictionaries(names, st.integers() | st.text(st.sampled_from('{}[]",:\\ é🦉'), max_size=8), max_size=3)


@given(st.lists(st.tuples(names, arguments), max_size=4))
def test_what_was_written_is_read_back(wanted: list[tuple[str, dict[str, Any]]]) -> None:
    text = " ".join(call(name, **args) for name, args in wanted)
    content, calls = parse_hermes(text)
    assert content == ""
    assert [(c.name, c.arguments) for c in calls] == wanted


pieces = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "f"',
    ', "arguments": {"a": 1}}',
    "{",
    "}",
    " ",
]


@given(st.lists(st.sampled_from(pieces) | st.text(max_size=4), max_size=12))
def test_nothing_a_model_may_write_raises(parts: list[str]) -> None:
    text = "".join(parts)
    content, calls = parse_hermes(text)
    assert to_action(content, calls)["type"] == ("tool_call" if calls else "text")
    assert [c.id for c in calls] == [f"call_{i}" for i in range(len(calls))]


@pytest.mark.parametrize("tag", ["</tool_call>", "<tool_call>", "<think>", "</think>", "<tool_call>{}</tool_call>"])
def test_a_tag_inside_a_string_is_only_text(tag: str) -> None:
    text = f"{call('write', text=f'say {tag} twice: {tag}')} and {call('add', a=1)}"
    content, calls = parse_hermes(text)
    assert content == "and"
    assert [c.arguments for c in calls] == [{"text": f"say {tag} twice: {tag}"}, {"a": 1}]


@pytest.mark.parametrize("end", ["", " ", "</tool_call", "</tool_call\n", "<", "\n</TOOL"])
def test_a_call_is_whole_before_its_closing_tag_is(end: str) -> None:
    assert parse_hermes(f"so {call('add', a=1).removesuffix('</tool_call>')}{end}") == (
        "so",
        [ToolCall(id="call_0", name="add", arguments={"a": 1})],
    )


def test_a_forgotten_closing_tag_does_not_spoil_the_next_call() -> None:
    text = f"{call('add', a=1).removesuffix('</tool_call>')}\n{call('add', a=2)}"
    assert [c.arguments for c in parse_hermes(text)[1]] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("cut", range(len('<tool_call>{"name": "f", "arguments": {"a": "}"}}') - 1))
def test_a_reply_cut_anywhere_in_a_call_makes_no_other_call(cut: int) -> None:
    content, calls = parse_hermes('<tool_call>{"name": "f", "arguments": {"a": "}"}}'[: cut + 1])
    if cut + 1 < len("<tool_call>"):
        assert calls == []
    else:
        assert content == ""
        assert [(c.name, isinstance(c.arguments, str)) for c in calls] == [("", True)]


@pytest.mark.parametrize("after", ["}", " oops", ', {"name": "g"}', "\n" + '{"name": "g"}'])
def test_more_than_one_object_in_a_block_is_not_guessed_at(after: str) -> None:
    inside = '{"name": "f", "arguments": {"a": "</tool_call>"}}' + after
    assert parse_hermes(f"<tool_call>{inside}</tool_call>!") == (
        "!",
        [ToolCall(id="call_0", name="", arguments=inside)],
    )


@pytest.mark.parametrize("fence", ["```", "```json", "```JSON ", "```tool_call"])
def test_a_code_fence_around_the_object_is_passed_over(fence: str) -> None:
    text = f'<tool_call>\n{fence}\n{{"name": "add", "arguments": {{"a": 1}}}}\n```\n</tool_call>'
    assert parse_hermes(text) == parse_hermes(call("add", a=1))


def test_tags_may_be_written_in_capitals() -> None:
    text = call("add", a=1).replace("tool_call", "TOOL_CALL")
    assert parse_hermes(f"<THINK>{text}</Think>{text}")[1] == [ToolCall(id="call_0", name="add", arguments={"a": 1})]


def test_letters_that_only_fold_to_a_tag_are_no_tag() -> None:
    text = '<tool_\uff43all>{"name": "f"}</tool_call> <thin\u212a>'
    assert parse_hermes(text) == (text, [])


def test_the_keys_of_a_call_are_exact() -> None:
    assert parse_hermes(block({"Name": "f", "Arguments": {}}))[1][0].name == ""


def test_arguments_written_as_json_in_a_string_are_read() -> None:
    assert parse_hermes(block({"name": "f", "arguments": '{"a": {"b": "</tool_call>"}}'}))[1][0].arguments == {
        "a": {"b": "</tool_call>"}
    }


@pytest.mark.parametrize("given", ['{"a": 1} x', '{"a": NaN}', '{"a"', "[1]", '"{}"', "", '{"a": "\\ud800"}'])
def test_arguments_in_a_string_that_are_no_object_stay_that_string(given: str) -> None:
    assert parse_hermes(block({"name": "f", "arguments": given}))[1][0].arguments == given


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_json_does_not_have_makes_a_bad_call(value: str) -> None:
    inside = f'{{"name": "f", "arguments": {{"a": {value}, "b": "</tool_call>"}}}}'
    content, calls = parse_hermes(f"<tool_call>{inside}</tool_call> then {call('add', a=1)}")
    assert content == "then"
    assert calls[0] == ToolCall(id="call_0", name="", arguments=inside)
    assert calls[1].arguments == {"a": 1}


def test_of_a_key_given_twice_the_last_counts() -> None:
    inside = '{"name": "f", "name": "g", "arguments": {"a": 1, "a": 2}}'
    assert parse_hermes(f"<tool_call>{inside}</tool_call>")[1] == [ToolCall(id="call_0", name="g", arguments={"a": 2})]


def test_rendering_writes_what_qwen_writes() -> None:
    calls = [ToolCall(name="f", arguments={"q": "é"}), ToolCall(name="", arguments="as {it was")]
    assert render_hermes("Well:", calls).splitlines() == [
        "Well:",
        "<tool_call>",
        '{"name": "f", "arguments": {"q": "é"}}',
        "</tool_call>",
        "<tool_call>",
        "as {it was",
        "</tool_call>",
    ]
