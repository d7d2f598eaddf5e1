"""Whatever a model writes: parsers give text and calls, never raise, and what they give can be kept and sent."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from fuzzing import JSON, TEXT, fuzz
from hypothesis import strategies as st

from toolwise.messages import Message, ToolCall, parse_arguments
from toolwise.rollout.parsers import BLOCKS, PARSERS, RENDERERS, detect_parser, open_stream, to_action
from toolwise.rollout.parsers.json_calls import THOUGHT_CLOSINGS, THOUGHT_OPENINGS
from toolwise.rollout.parsers.stream import CallFinished, ContentPiece
from toolwise.serialization.json_text import json_text

FORMAT_MARKS = sorted(
    {mark for form in BLOCKS.values() for mark in (*form.readers, *form.dropped, *form.triggers)}
    | {*THOUGHT_OPENINGS, *THOUGHT_CLOSINGS}
)
MARKS = st.sampled_from(
    [
        *FORMAT_MARKS,
        "<function=f>",
        "<parameter=a>\n",
        "\n</parameter>",
        "</function>",
        "f\n<arg_key>a</arg_key>\n<arg_value>",
        "</arg_value>",
        '<invoke name="f"><parameter name="a">',
        "</invoke>",
        "function<｜tool▁sep｜>f\n```json\n",
        "functions.f:0<|tool_call_argument_begin|>",
        "commentary to=functions.f <|constrain|>json<|message|>",
        "analysis<|message|>",
        'call:f{a:<|"|>',
        '<|"|>',
        "<escape>",
        "print(f(a='",
        "<tool_call>",
        "</tool_call>",
        "<tool_call>\n",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "Action:",
        "<response>",
        "</response>",
        '{"name": "f", "arguments": ',
        '{"name": "f", "parameters": {',
        '"arguments": "',
        "{",
        "}",
        "[",
        "]",
        "\\",
        '"',
        "```json\n",
        "```",
        "f(x=1)",
        "[f(x=[1, {'a': 2}])]",
        "\n\n  \t",
        "NaN",
        "9" * 4_400,
        "[" * 2_000,
        '{"a":' * 1_500,
    ]
)
CALLS = st.fixed_dictionaries({}, optional={"name": JSON, "arguments": JSON, "parameters": JSON, "id": JSON})
WRITTEN = st.lists(st.one_of(MARKS, MARKS, TEXT, CALLS.map(lambda call: json_text(call))), max_size=10).map("".join)


@fuzz(st.sampled_from(sorted(PARSERS)), WRITTEN, examples=80)
def test_any_text_is_read(name: str, text: str) -> None:
    content, calls = PARSERS[name](text)
    assert isinstance(content, str)
    message = Message(role="assistant", content=content, tool_calls=calls or None)
    json_text(message.to_openai()).encode()
    to_action(content, calls)
    for call in calls:
        assert isinstance(call, ToolCall)
        assert isinstance(call.arguments, dict | str)
        if isinstance(call.arguments, dict):
            json.dumps(call.arguments, allow_nan=False)


@fuzz(
    st.sampled_from(sorted(set(RENDERERS) - {"action"})),
    TEXT,
    st.lists(st.tuples(TEXT, st.dictionaries(TEXT, JSON, max_size=3)), max_size=2),
)
def test_any_call_is_written_and_read(name: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    made = []
    for tool, arguments in calls:
        try:
            made.append(ToolCall(name=tool, arguments=json.loads(json.dumps(arguments, allow_nan=False))))
        except ValueError:
            return
    PARSERS[name](RENDERERS[name](content, made))


@fuzz(st.one_of(WRITTEN, JSON.map(json_text)))
def test_any_arguments_are_read(text: str) -> None:
    assert isinstance(parse_arguments(text), dict | str)


@fuzz(WRITTEN, st.lists(TEXT, max_size=3))
def test_any_template_is_looked_at(template: str, texts: list[str]) -> None:
    assert detect_parser(template, texts) in PARSERS


@fuzz(
    st.sampled_from(sorted(PARSERS)),
    WRITTEN,
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from([None, False, True]),
)
def test_any_pieces_give_what_the_whole_text_gives(name: str, text: str, cuts: list[int], opened: bool | None) -> None:
    stream = open_stream(name, opened)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events = [e for a, b in pairwise(places) for e in stream.feed(text[a:b])] + stream.finish()
    assert stream.reply is not None
    content, calls = stream.reply
    assert "".join(event.text for event in events if isinstance(event, ContentPiece)) == content
    assert [event.call for event in events if isinstance(event, CallFinished)] == calls
    if opened is None:
        assert (content, calls) == PARSERS[name](text)


@fuzz(st.sampled_from(sorted(set(BLOCKS) - {"gpt_oss", "muse_glimmer"})), WRITTEN, examples=60)
def test_every_word_is_in_the_content_or_in_a_call(name: str, text: str) -> None:
    """Words, not marks: those say how the rest is read."""
    content, calls = PARSERS[name](f"{text} lastword")
    everything = content + "".join(call.name + json.dumps(call.arguments, ensure_ascii=False) for call in calls)
    assert "lastword" in everything
