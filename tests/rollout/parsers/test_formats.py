"""Properties of every tool-call format: any text parses without error, in linear time, and calls round-trip."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from toolwise.messages import Message, ToolCall
from toolwise.rollout.parsers import PARSERS, RENDERERS, to_action

CALLING = ["hermes", "llama3", "mistral", "rlla"]
"""Formats that have calls."""
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
    "<|eom_id|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<action>",
    "</action>",
    "<TOOL_CALL>",
    "```json\n",
    "```",
]
PIECES = [
    *MARKS,
    '{"name": "f"',
    ', "arguments": {"a": 1}}',
    ', "parameters": {"a": NaN}}',
    '{"name": "f", "parameters": {}}',
    '[{"name": "f", "arguments": {}}]',
    "[f(a=1)]",
    "[f(a=",
    "f.call(q='x')",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "\\ud800",
    "\ud800",
    "\0",
    ";",
    "\n",
    " ",
    "9" * 700,
    "1e999",
    "[" * 3000,
]

any_text = st.text(st.characters(), max_size=20)
messes = st.lists(st.sampled_from(PIECES) | any_text, max_size=14).map("".join)


@pytest.mark.parametrize("name", sorted(PARSERS))
@given(text=messes)
@example(text='<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>")
@example(text='[TOOL_CALLS] [{"name": "f", "arguments": ' + '{"a":' * 5000)
@example(text='{"name": "f", "parameters": {"a": "\\udfff"}}')
@example(text="[f(a=0x" + "f" * 9000 + ")]")
@example(text="[f(a={1}, b=b'x', c=1j)]")
@example(text="[f(a='\\ud800')]")
def test_nothing_a_model_may_write_raises(name: str, text: str) -> None:
    content, calls = PARSERS[name](text)
    assert to_action(content, calls)["type"] == ("tool_call" if calls else "text")
    assert [c.id for c in calls] == [f"call_{i}" for i in range(len(calls))]
    assert type(content) is str
    assert all(type(c.arguments) in (str, dict) for c in calls)
    # It can be stored: written as strict JSON and read back unchanged.
    message = Message(role="assistant", content=content, tool_calls=calls or None)
    for call in calls:
        json.dumps(call.arguments, allow_nan=False)
    written = json.dumps(message.to_openai(), ensure_ascii=False, allow_nan=False).encode()
    assert Message.model_validate(json.loads(written)).content == content


@pytest.mark.parametrize("name", sorted(PARSERS))
@given(text=st.text("ab .,!?\n", max_size=30))
def test_plain_text_is_all_content(name: str, text: str) -> None:
    content, calls = PARSERS[name](text)
    assert (content.strip(), calls) == (text.strip(), [])


strings = st.lists(st.sampled_from([*MARKS, *'{}[]",:;\\\n']) | st.text(max_size=3), max_size=4).map("".join)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3), max_leaves=6
)
calls_made = st.lists(st.tuples(strings, st.dictionaries(strings, values, max_size=3)), min_size=1, max_size=4)
words = st.text(st.sampled_from("abé🦉 .,\n"), max_size=12).map(str.strip)


def made(wanted: list[tuple[str, dict[str, Any]]]) -> list[ToolCall]:
    return [ToolCall(id=f"call_{i}", name=name, arguments=arguments) for i, (name, arguments) in enumerate(wanted)]


@pytest.mark.parametrize("name", CALLING)
@given(content=words, wanted=calls_made, thought=st.sampled_from(["", "<think>so</think>", "so <tool_call></think>"]))
def test_what_was_written_is_read_back(
    name: str, content: str, wanted: list[tuple[str, dict[str, Any]]], thought: str
) -> None:
    calls = made(wanted)
    assert PARSERS[name](RENDERERS[name](thought + content, calls)) == (thought + content, calls)


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=50)
@given(content=words, wanted=calls_made)
def test_auto_reads_back_what_any_format_wrote(
    name: str, content: str, wanted: list[tuple[str, dict[str, Any]]]
) -> None:
    calls = made(wanted)
    assert PARSERS["auto"](RENDERERS[name](content, calls)) == (content, calls)


@pytest.mark.parametrize("name", CALLING)
@given(content=words)
def test_without_calls_only_the_content_is_written(name: str, content: str) -> None:
    assert RENDERERS[name](content, []) == content


@pytest.mark.parametrize("name", CALLING)
@given(wanted=calls_made, data=st.data())
def test_a_reply_that_is_cut_off_makes_no_call_that_was_not_written(
    name: str, wanted: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    """Wherever the text is cut: the calls before the cut are unchanged, and nothing is parsed from strings after it."""
    text = RENDERERS[name]("Now:", made(wanted))
    _, calls = PARSERS[name](text[: data.draw(st.integers(0, len(text)))])
    readable = [(c.name, c.arguments) for c in calls if isinstance(c.arguments, dict)]
    assert readable == wanted[: len(readable)]


@pytest.mark.parametrize("name", [*CALLING, "auto"])
@given(
    wanted=st.lists(st.tuples(words, st.dictionaries(words, words, max_size=2)), min_size=1, max_size=2),
    opening=st.sampled_from(["<think>", "", "First, <think>"]),
    mention=st.sampled_from(CALLING),
    real=st.booleans(),
)
def test_a_thought_may_show_calls_and_makes_none(
    name: str, wanted: list[tuple[str, dict[str, Any]]], opening: str, mention: str, real: bool
) -> None:
    """Also if the prompt opened the thought, so that only its end is in the text."""
    calls = made(wanted)
    shown = RENDERERS[mention]("", calls)
    thought = f"{opening}I could write {shown} but no, that <tool_call> is not it.</think>"
    reply = RENDERERS[name if name != "auto" else "hermes"]("", calls) if real else "It is 4."
    assert PARSERS[name](f"{thought}\n{reply}") == ((thought, calls) if real else (f"{thought}It is 4.", []))


@pytest.mark.parametrize("name", [*CALLING, "auto"])
def test_a_thought_that_never_ends_makes_no_calls(name: str) -> None:
    text = "<think>so " + RENDERERS[name if name != "auto" else "hermes"]("", made([("f", {})]))
    assert PARSERS[name](text) == (text, [])


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("spoil", ["9" * 700, "NaN", "1e999", '"\\ud800"', "[" * 150 + "]" * 150, "{'a': 1}", "tru"])
def test_a_value_that_nobody_can_keep_makes_a_bad_call_and_keeps_its_text(name: str, spoil: str) -> None:
    text = RENDERERS[name]("so", made([("f", {"a": "HERE"})])).replace('"HERE"', spoil)
    content, calls = PARSERS[name](text)
    assert content == "so"
    assert len(calls) == 1
    assert isinstance(calls[0].arguments, str)
    assert spoil in calls[0].arguments


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("called", ["3", "null", '["f"]', "{}"])
def test_a_name_that_is_no_string_makes_a_bad_call(name: str, called: str) -> None:
    text = RENDERERS[name]("", made([("HERE", {"a": 1})])).replace('"HERE"', called)
    _, calls = PARSERS[name](text)
    assert [(c.name, type(c.arguments)) for c in calls] == [("", str)]


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_halves_of_characters_become_question_marks(name: str) -> None:
    assert PARSERS[name]("a\ud800b") == ("a?b", [])


@pytest.mark.parametrize("name", CALLING)
def test_nesting_is_read_up_to_a_bound(name: str) -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return value

    shallow, deep = made([("f", {"a": nested(90)})]), made([("f", {"a": nested(110)})])
    assert PARSERS[name](RENDERERS[name]("", shallow))[1] == shallow
    assert [type(c.arguments) for c in PARSERS[name](RENDERERS[name]("", deep))[1]] == [str]


HEAVY = [
    ("hermes", "", "<tool_call>x</tool_call>", ""),
    ("hermes", "", '<tool_call>{"</tool_call>', ""),
    ("hermes", "", '<tool_call>["</tool_call><tool_call>[", "', ""),
    ("hermes", "", '<tool_call>{"', "</think>"),
    ("hermes", "<tool_call>", "[", ""),
    ("hermes", "<tool_call>", " ", "x</tool_call>"),
    ("rlla", "<tool_call>\n", '{"a":\n', ""),
    ("rlla", "", '<tool_call>{"a":', ""),
    ("rlla", "", '<tool_call>{"a": 1}\n', ""),
    ("llama3", "", '<|python_tag|>{"', "</think>"),
    ("llama3", "<|python_tag|>", ";{", ""),
    ("llama3", '{"name": "f", "parameters": {}}', "<|eot_id|>", " "),
    ("llama3", "[f(a=1, ", "b=[", ""),
    ("llama3", "", " ", "x<|eot_id|>"),
    ("mistral", "", "[TOOL_CALLS] [", ""),
    ("mistral", "[TOOL_CALLS] [", "1,", "1]"),
    ("mistral", "", '[TOOL_CALLS]a"[ARGS]{', ""),
    ("mistral", "[TOOL_CALLS]", "a", " [CALL_ID]"),
    ("action", "", "<action>a", "</think>"),
    ("action", "", "<think>", ""),
]
"""(format, what it starts with, what is repeated, what it ends with): each a square for some plausible way to read."""


def seconds(name: str, text: str) -> float:
    """CPU time of this process, the best of a few runs: other load on the machine must not count."""

    def once() -> float:
        began = time.process_time()
        PARSERS[name](text)
        return time.process_time() - began

    return min(once() for _ in range(3))


def grows_linearly(name: str, start: str, unit: str, end: str) -> bool:
    """Eight times the text takes far less than 64 times as long. Negligible times are not compared."""
    short, long = (start + unit * (size // len(unit)) + end for size in (15_000, 120_000))
    return (taken := seconds(name, long)) < 0.1 or taken < 24 * seconds(name, short)


@pytest.mark.parametrize(("name", "start", "unit", "end"), HEAVY)
def test_long_texts_are_read_in_linear_time(name: str, start: str, unit: str, end: str) -> None:
    assert grows_linearly(name, start, unit, end)
    assert grows_linearly("auto", start, unit, end)


def test_a_megabyte_of_garbage_is_read_in_seconds() -> None:
    text = "".join(PIECES[i * i % len(PIECES)] for i in range(40_000))[:1_000_000]
    assert len(text) == 1_000_000
    assert sum(seconds(name, text) for name in PARSERS) < 30


@pytest.mark.long
@pytest.mark.parametrize("name", [*CALLING, "action", "auto"])
def test_every_mix_of_marks_is_read_in_linear_time(name: str) -> None:
    for start in ("", "<tool_call>", "[TOOL_CALLS]a ", "<|python_tag|>", '{"name":'):
        for unit in {*PIECES[:-4], *(case[2] for case in HEAVY)}:
            for end in ("", "</think>"):
                assert grows_linearly(name, start, unit, end), (start, unit, end)
