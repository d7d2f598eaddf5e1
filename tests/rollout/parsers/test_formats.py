"""Properties of every tool-call format: any text parses without error, in linear time, and calls round-trip."""

from __future__ import annotations

import json
import time
from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from toolwise.messages import Message, ToolCall
from toolwise.rollout.parsers import BLOCKS, PARSERS, RENDERERS, reasoning_of, to_action
from toolwise.rollout.parsers.json_calls import THOUGHT_CLOSINGS, THOUGHT_OPENINGS

JSON_NAMED = [
    "hermes", "llama3", "mistral", "rlla", "cohere", "granite", "phi4", "hunyuan", "nemotron", "internlm", "smollm3",
]  # fmt: skip
"""Formats that write the name of a call as a JSON string."""
JSON_ARGUMENTS = [*JSON_NAMED, "deepseek_v3", "deepseek_v31", "kimi_k2", "gpt_oss"]
XML = ["qwen3_coder", "seed_oss", "glm", "minimax", "deepseek_v32", "muse_glimmer"]
PYTHON = ["lfm2", "olmo3", "gemma3"]
CALLING = [*JSON_ARGUMENTS, *XML, *PYTHON, "gemma4", "functiongemma"]
"""Formats that have calls."""
THINKING = [name for name in CALLING if BLOCKS[name].thoughts]
"""Formats in which a thought is between a pair of tags."""
FORMAT_MARKS = sorted({mark for form in BLOCKS.values() for mark in (*form.readers, *form.dropped, *form.triggers)})
MARKS = [
    *FORMAT_MARKS,
    *THOUGHT_OPENINGS,
    *THOUGHT_CLOSINGS,
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "</arg_value>",
    '<invoke name="f">',
    '<parameter name="a">',
    "</invoke>",
    '<｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜parameter>",
    "<｜tool▁sep｜>",
    "<|tool_call_argument_begin|>",
    "commentary to=functions.f ",
    "<|message|>",
    "call:f{",
    "<|eom_id|>",
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
    "a=1",
    '<|"|>',
    "<escape>",
    "'",
    "a:1,",
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


@given(text=messes)
@example(text='<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>")
@example(text='[TOOL_CALLS] [{"name": "f", "arguments": ' + '{"a":' * 5000)
@example(text='{"name": "f", "parameters": {"a": "\\udfff"}}')
@example(text="[f(a=0x" + "f" * 9000 + ")]")
@example(text="[f(a={1}, b=b'x', c=1j)]")
@example(text="[f(a='\\ud800')]")
def test_nothing_a_model_may_write_raises(text: str) -> None:
    for name, parse in PARSERS.items():
        content, calls = parse(text)
        assert to_action(content, calls)["type"] == ("tool_call" if calls else "text"), name
        assert [c.id for c in calls] == [f"call_{i}" for i in range(len(calls))], name
        assert type(content) is str, name
        assert all(type(c.arguments) in (str, dict) for c in calls), name
        # It can be stored: written as strict JSON and read back unchanged.
        message = Message(role="assistant", content=content, tool_calls=calls or None)
        for call in calls:
            json.dumps(call.arguments, allow_nan=False)
        written = json.dumps(message.to_openai(), ensure_ascii=False, allow_nan=False).encode()
        assert Message.model_validate(json.loads(written)).content == content, name


@given(text=st.text("ab .,!?\n", max_size=30))
def test_plain_text_is_all_content(text: str) -> None:
    for name, parse in PARSERS.items():
        content, calls = parse(text)
        assert (content.strip(), calls) == (text.strip(), []), name


KEPT = [f"word{n}word" for n in range(8)]
HEADERS = {"<|start|>", "<|channel|>", "<action>", "[CALL_ID]", "<|tool_call_begin|>", "<|channel>thought"}
"""What follows these is a role, a channel or an id, or makes the rest of the text no part of the action."""
TEXT_PIECES = [piece for piece in PIECES if piece not in HEADERS]


@st.composite
def wordy_replies(draw: st.DrawFn) -> str:
    """Pieces of all formats with words between them."""
    parts: list[str] = []
    for word in KEPT:
        parts += draw(st.lists(st.sampled_from(TEXT_PIECES), max_size=2))
        parts.append(draw(st.sampled_from(["", " ", "\n"])) + word)
    return "".join(parts)


@settings(max_examples=40)
@given(text=wordy_replies())
def test_no_word_is_lost(text: str) -> None:
    for name in sorted(set(PARSERS) - {"action"}):  # what is not an action is in the raw output
        reply = PARSERS[name](text)
        content, calls = reply
        kept = [content, reasoning_of(reply)]
        for call in calls:
            kept += [call.name, call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)]
        assert [word for word in KEPT if not any(word in part for part in kept)] == [], name


strings = st.lists(st.sampled_from([*MARKS, *'{}[]",:;\\\n']) | st.text(max_size=3), max_size=4).map("".join)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3), max_leaves=6
)
identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not iskeyword(name))
calls_made = st.lists(st.tuples(strings, st.dictionaries(strings, values, max_size=3)), min_size=1, max_size=4)
named_calls = st.lists(st.tuples(identifiers, st.dictionaries(strings, values, max_size=3)), min_size=1, max_size=4)
plain_calls = st.lists(st.tuples(identifiers, st.dictionaries(identifiers, values, max_size=3)), min_size=1, max_size=4)
words = st.text(st.sampled_from("abé🦉 .,\n"), max_size=12).map(str.strip)


KINDS = {
    "any string": (calls_made, JSON_NAMED),
    "named by words": (named_calls, [name for name in JSON_ARGUMENTS if name not in JSON_NAMED]),
    "words": (plain_calls, [name for name in CALLING if name not in JSON_ARGUMENTS]),
}
"""Formats by the calls that they can write: names and keys of most formats are words, not strings. To draw calls
takes far longer than to write and read them, so that each is tried with all formats of its kind."""


def made(wanted: list[tuple[str, dict[str, Any]]]) -> list[ToolCall]:
    return [ToolCall(id=f"call_{i}", name=name, arguments=arguments) for i, (name, arguments) in enumerate(wanted)]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), content=words, thought=st.sampled_from(["", "<think>so</think>", "so <tool_call></think>"]))
def test_what_was_written_is_read_back(kind: str, data: st.DataObject, content: str, thought: str) -> None:
    drawn, names = KINDS[kind]
    calls = made(data.draw(drawn))
    for name in names:
        said = (thought if name in THINKING else "") + content
        assert PARSERS[name](RENDERERS[name](said, calls)) == (said, calls), name


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50)
@given(data=st.data(), content=words)
def test_auto_reads_back_what_any_format_wrote(kind: str, data: st.DataObject, content: str) -> None:
    drawn, names = KINDS[kind]
    calls = made(data.draw(drawn))
    for name in names:
        if name == "glm" and not calls[0].arguments:  # `<tool_call>f</tool_call>` is also a bad call of Hermes' format
            continue
        assert PARSERS["auto"](RENDERERS[name](content, calls)) == (content, calls), name


@given(content=words)
def test_without_calls_only_the_content_is_written(content: str) -> None:
    for name in CALLING:
        assert RENDERERS[name](content, []) == content, name


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_reply_that_is_cut_off_makes_no_call_that_was_not_written(kind: str, data: st.DataObject) -> None:
    """Wherever the text is cut: the calls before the cut are unchanged, and nothing is parsed from strings after it."""
    drawn, names = KINDS[kind]
    wanted = data.draw(drawn)
    for name in names:
        text = RENDERERS[name]("Now:", made(wanted))
        _, calls = PARSERS[name](text[: data.draw(st.integers(0, len(text)))])
        readable = [(c.name, c.arguments) for c in calls if isinstance(c.arguments, dict)]
        assert readable == wanted[: len(readable)], name


@given(
    wanted=st.lists(st.tuples(identifiers, st.dictionaries(identifiers, words, max_size=2)), min_size=1, max_size=2),
    opening=st.sampled_from(["<think>", "", "First, <think>"]),
    mention=st.sampled_from(CALLING),
    real=st.booleans(),
)
def test_a_thought_may_show_calls_and_makes_none(
    wanted: list[tuple[str, dict[str, Any]]], opening: str, mention: str, real: bool
) -> None:
    """Also if the prompt opened the thought, so that only its end is in the text."""
    calls = made(wanted)
    shown = RENDERERS[mention]("", calls)
    thought = f"{opening}I could write {shown} but no, that <tool_call> is not it.</think>"
    expected = (thought, calls) if real else (f"{thought}It is 4.", [])
    for name in (*THINKING, "auto"):
        reply = RENDERERS[name if name != "auto" else "hermes"]("", calls) if real else "It is 4."
        assert PARSERS[name](f"{thought}\n{reply}") == expected, name


@pytest.mark.parametrize("name", [*THINKING, "auto"])
def test_a_thought_that_never_ends_makes_no_calls(name: str) -> None:
    text = "<think>so " + RENDERERS[name if name != "auto" else "hermes"]("", made([("f", {})]))
    assert PARSERS[name](text) == (text, [])


@pytest.mark.parametrize("name", JSON_ARGUMENTS)
@pytest.mark.parametrize("spoil", ["9" * 700, "NaN", "1e999", '"\\ud800"', "[" * 150 + "]" * 150, "{'a': 1}", "tru"])
def test_a_value_that_nobody_can_keep_makes_a_bad_call_and_keeps_its_text(name: str, spoil: str) -> None:
    text = RENDERERS[name]("so", made([("f", {"a": "HERE"})])).replace('"HERE"', spoil)
    content, calls = PARSERS[name](text)
    assert content == "so"
    assert len(calls) == 1
    assert isinstance(calls[0].arguments, str)
    assert spoil in calls[0].arguments


@pytest.mark.parametrize("name", JSON_NAMED)
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
    (call,) = PARSERS[name](RENDERERS[name]("", deep))[1]
    if name in XML:  # what is not a JSON value is a string
        assert call.arguments == {"a": json.dumps(nested(110))}
    else:
        assert type(call.arguments) is str


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
    ("deepseek_v3", "", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{", ""),
    ("deepseek_v31", "", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"', "</think>"),
    ("kimi_k2", "", "<|tool_call_begin|>f:", ""),
    ("kimi_k2", "<|tool_call_begin|>", "f", "<|tool_call_argument_begin|>"),
    ("cohere", "", '<|START_ACTION|>[{"', "</think>"),
    ("phi4", "", "<|tool_call|>[] ", ""),
    ("qwen3_coder", "", "<tool_call><function=f><parameter=a>", ""),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>", "</parameter> ", ""),
    ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>1</parameter>", "</think>"),
    ("qwen3_coder", "", "<tool_call><function=f>", "</think>"),
    ("glm", "", "<tool_call>f<arg_key>a</arg_key><arg_value>", ""),
    ("glm", "", "<tool_call>f", "</think>"),
    ("minimax", "<minimax:tool_call>", '<invoke name="f"></invoke>', ""),
    ("deepseek_v32", "", '<｜DSML｜function_calls><｜DSML｜invoke name="f">', ""),
    ("lfm2", "", "<|tool_call_start|>[f(a='", ""),
    ("lfm2", "<|tool_call_start|>[f(a=", "\\'", ""),
    ("lfm2", "<|tool_call_start|>", "'\"", "<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>", " ", "</think>"),
    ("olmo3", "", "<function_calls>f(", "</think>"),
    ("gemma3", "```tool_code", " ", "</think>"),
    ("gemma3", "", "```tool_code ", "</think>"),
    ("gemma3", "", "```tool_code\nprint(", ""),
    ("gemma4", "", '<|tool_call>call:f{a:<|"|>', ""),
    ("gemma4", "<|tool_call>call:f{a:[", '<|"|>x<|"|>,', ""),
    ("gemma4", "", "<|tool_call>call:f{a:[", "</think>"),
    ("gemma4", "<|tool_call>call:f{", "a", ""),
    ("gpt_oss", "", "<|channel|>analysis<|message|>", ""),
    ("gpt_oss", "", "<|start|>assistant<|channel|>", ""),
    ("gpt_oss", "", "<|channel|>commentary to=f<|message|>{", ""),
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


@pytest.mark.parametrize(
    ("name", "start", "unit", "end"),
    [pytest.param(*heavy, marks=[pytest.mark.long] if i % 4 else []) for i, heavy in enumerate(HEAVY)],
)
def test_long_texts_are_read_in_linear_time(name: str, start: str, unit: str, end: str) -> None:
    assert grows_linearly(name, start, unit, end)
    assert grows_linearly("auto", start, unit, end)


def test_a_megabyte_of_garbage_is_read_in_seconds() -> None:
    text = "".join(PIECES[i * i % len(PIECES)] for i in range(90_000))[:1_000_000]
    assert len(text) == 1_000_000
    assert sum(seconds(name, text) for name in PARSERS) < 30


@pytest.mark.long
@pytest.mark.parametrize("name", [*CALLING, "action", "auto"])
def test_every_mix_of_marks_is_read_in_linear_time(name: str) -> None:
    form = BLOCKS.get(name)
    foreign = set(FORMAT_MARKS) - {*form.readers, *form.dropped, *form.triggers} if form else set()
    starts = {"", "<tool_call>", "[TOOL_CALLS]a ", "<|python_tag|>", '{"name":', *(form.readers if form else ())}
    for start in starts - foreign:
        for unit in {*PIECES[:-4], *(case[2] for case in HEAVY)} - foreign:
            for end in ("", "</think>"):
                assert grows_linearly(name, start, unit, end), (start, unit, end)
