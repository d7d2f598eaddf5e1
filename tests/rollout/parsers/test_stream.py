"""Replies read piece by piece: any split gives what the whole text gives, and nothing that was reported changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import quick_first

from toolwise.messages import ToolCall
from toolwise.rollout.parsers import BLOCKS, PARSERS, RENDERERS, open_stream, parse_plain_text
from toolwise.rollout.parsers.blocks import Block, BlockFormat
from toolwise.rollout.parsers.json_calls import THOUGHT_CLOSINGS, THOUGHT_OPENINGS, JsonSource, ParsedReply
from toolwise.rollout.parsers.stream import CallFinished, CallStarted, CallStream, ContentPiece, StreamEvent
from toolwise.untrusted.bounds import MAX_CALLS

FORMATS = sorted(set(BLOCKS) - {"qwen", "granite"})
"""Without second names."""
STREAMING = [name for name in FORMATS if BLOCKS[name].streams]
OPEN = [None, False, True]
CALLS = [
    ToolCall(id="call_0", name="look_up", arguments={"word": 'it\'s "é" </b>\n', "l": [5, None]}),
    ToolCall(id="call_1", name="stop", arguments={}),
]


def read(name: str, pieces: Iterable[str], thought_open: bool | None = None) -> tuple[list[StreamEvent], ParsedReply]:
    stream = open_stream(name, thought_open)
    events = [event for piece in pieces for event in stream.feed(piece)]
    events += stream.finish()
    assert stream.reply is not None
    return events, stream.reply


def check(name: str, pieces: Sequence[str], thought_open: bool | None) -> None:
    events, reply = read(name, pieces, thought_open)
    assert "".join(event.text for event in events if isinstance(event, ContentPiece)) == reply[0]
    assert [event.call for event in events if isinstance(event, CallFinished)] == reply[1]
    started = [event.index for event in events if isinstance(event, CallStarted)]
    finished = [event.index for event in events if isinstance(event, CallFinished)]
    assert started == finished == list(range(len(reply[1])))
    assert all(event.text for event in events if isinstance(event, ContentPiece))
    if thought_open is None:
        assert reply == PARSERS[name]("".join(pieces))
    for event in events:
        if isinstance(event, CallStarted) and isinstance(reply[1][event.index].arguments, dict):
            assert event.name == reply[1][event.index].name


def fixtures(name: str) -> list[str]:
    written = RENDERERS[name]("Well.", CALLS)
    bare = RENDERERS[name]("", CALLS)
    return [
        f"{written} And so on. \n",
        f"<think>I could {bare}\n</think>\n\n{bare}"[: -len(bare) // 4],
        f" {bare}</think> No <b>calls</b> < here, \n ",
        f"First, <think>{bare[:-1]}",
        f"<think>a</think>\n <think>{bare}</think> {bare}",
        f"\ufeff<think>a</think>\n\u200b[THINK]{bare}",
        written.replace("look_up", "look\\up").replace(":", "=").replace('"', "'"),
    ]


@pytest.mark.parametrize(
    "thought_open", [None, *(pytest.param(opened, marks=pytest.mark.long) for opened in (True, False))]
)
@pytest.mark.parametrize("stride", quick_first([5, 1], [5]))
@pytest.mark.parametrize("name", FORMATS)
def test_every_split_gives_what_the_whole_text_gives(name: str, stride: int, thought_open: bool | None) -> None:
    for text in fixtures(name):
        for cut in range(0, len(text) + 1, stride):
            check(name, [text[:cut], text[cut:]], thought_open)
        check(name, list(text), thought_open)
    for text in ("", " \n", " a <", f"<think>{fixtures(name)[0]}"):
        check(name, [text], thought_open)
        check(name, list(text), thought_open)


pieces = [
    *THOUGHT_OPENINGS[:2],
    *THOUGHT_CLOSINGS[:2],
    " ",
    "\n",
    "a",
    '"',
    "'",
    "{",
    "}",
    "[",
    "]",
    "<",
    "</",
    "\ud800",
    "\u200b",
]


@pytest.mark.parametrize("thought_open", OPEN)
@settings(max_examples=200)
@given(data=st.data(), name=st.sampled_from(FORMATS))
def test_any_text_in_any_pieces(thought_open: bool | None, name: str, data: st.DataObject) -> None:
    form = BLOCKS[name]
    bare = RENDERERS[name]("", CALLS)
    marks = [*form.readers, *form.dropped, *form.triggers, bare, bare[: len(bare) // 2], bare[len(bare) // 2 :]]
    text = "".join(data.draw(st.lists(st.sampled_from([*pieces, *marks, *marks]), max_size=9)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    check(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], thought_open)


@pytest.mark.parametrize("thought_open", OPEN)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "}{<|tool_response><think></think> <|tool_call>call:g{}<tool_call|>"),
        ("hermes", "\n{}{<think>'</think><tool_call>{}</tool_call>"),
        ("mistral", "</think> <think>[TOOL_CALLS] [{}"),
        ("rlla", ' a</think> </think><tool_call>{"name": "g"}</tool_call>'),
        ("llama3", '<think>{"name": "f", "parameters": {}}<|eom_id|>'),
        ("llama3", '</think>{"name": "f", "parameters": {}} '),
        ("gpt_oss", "<|start|>assistant<|channel|>commentary to=functions.g <|const```<|channel|>"),
    ],
)
def test_texts_in_which_a_part_depends_on_what_follows(name: str, text: str, thought_open: bool | None) -> None:
    for cut in range(len(text) + 1):
        check(name, [text[:cut], text[cut:]], thought_open)
    check(name, list(text), thought_open)


@pytest.mark.parametrize("name", STREAMING)
def test_content_and_calls_are_reported_as_soon_as_they_are_certain(name: str) -> None:
    stream = open_stream(name, thought_open=False)
    reported: list[tuple[int, StreamEvent]] = []
    text = RENDERERS[name]("Well.", CALLS)
    for position, letter in enumerate(text):
        reported += [(position, event) for event in stream.feed(letter)]
    content = [(position, event.text) for position, event in reported if isinstance(event, ContentPiece)]
    assert content == list(enumerate("Well."))
    names = [(event.index, event.name) for _, event in reported if isinstance(event, CallStarted)]
    assert names == [(0, "look_up"), (1, "stop")]
    assert next(position for position, event in reported if isinstance(event, CallStarted)) < text.index("é")
    assert [event.call for _, event in reported if isinstance(event, CallFinished)] == CALLS


def test_a_thought_is_shown_and_its_calls_are_not_made() -> None:
    call = RENDERERS["hermes"]("", CALLS[:1])
    events, reply = read("hermes", [f"Or {call}?</th", f"ink>{call}"], thought_open=True)
    assert reply == (f"Or {call}?</think>", CALLS[:1])
    assert events[0] == ContentPiece(f"Or {call}?")


@pytest.mark.parametrize("thought_open", OPEN)
def test_calls_of_a_second_thought_are_not_made(thought_open: bool | None) -> None:
    call = RENDERERS["hermes"]("", CALLS[:1])
    start = "" if thought_open else "<think>"
    text = f"{start}a</think>\n<think>Or {call}?</think> \n<think></think>{call}"
    events, reply = read("hermes", list(text), thought_open)
    assert reply == (text.removesuffix(call), CALLS[:1])
    assert ContentPiece("?") in events
    assert read("hermes", list(text.removesuffix("think></think>" + call)), thought_open)[1][1] == []


def test_without_marks_everything_comes_at_the_end() -> None:
    for name in ("auto", "action", "none"):
        stream = open_stream(name)
        assert stream.feed("<action>go</action>") == []
        assert stream.finish() == [ContentPiece(PARSERS[name]("<action>go</action>")[0])]


def test_a_users_parser_reads_the_whole_text_once() -> None:
    texts: list[str] = []

    def parse(text: str) -> ParsedReply:
        texts.append(text)
        return parse_plain_text(text)

    stream = CallStream(parse)
    assert [stream.feed(letter) for letter in "words"] == [[]] * 5
    assert stream.finish() == [ContentPiece("words")]
    assert texts == ["words"]


def test_types_of_the_tools_count_here_too() -> None:
    properties = {"year": {"type": "string"}}
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}]
    text = "<tool_call>\n<function=f>\n<parameter=year>\n2024\n</parameter>\n</function>\n</tool_call>"
    for given_tools, year in ((tools, "2024"), (None, 2024)):
        stream = open_stream("qwen3_coder", False, given_tools)
        finished = [e.call.arguments for e in [*stream.feed(text), *stream.finish()] if isinstance(e, CallFinished)]
        assert finished == [{"year": year}]


def test_more_calls_than_a_reply_may_have() -> None:
    text = "<tool_call>{}</tool_call>" * (MAX_CALLS + 5)
    check("hermes", [text[i : i + 1000] for i in range(0, len(text), 1000)], False)
    assert len(read("hermes", [text], False)[1][1]) == MAX_CALLS + 1


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_the_work_is_linear(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that may end at any moment: readers see each character a bounded number of times on average."""
    work, read_block = 0, BlockFormat.read

    def count(form: BlockFormat, source: JsonSource, mark: re.Match[str]) -> Block:
        nonlocal work
        end = len(source)
        try:
            block = read_block(form, source, mark)
            end = block.end
        finally:
            work += end - mark.start()
        return block

    monkeypatch.setattr(BlockFormat, "read", count)
    opening = RENDERERS[name]("", CALLS).split("é")[0]
    text = (opening + "".join(f"x{trigger}" for trigger in BLOCKS[name].triggers) * 20_000)[:40_000]
    stream = open_stream(name, thought_open=False)
    for start in range(0, len(text), size):
        stream.feed(text[start : start + size])
    assert len(text) < work <= 5 * len(text) + 60_000
