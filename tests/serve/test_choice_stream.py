"""Pieces of a choice: joined, they are the message; a stop string is never shown, not even its start."""

from __future__ import annotations

import json

import pytest

from toolwise.rollout.call_format import find_format
from toolwise.serve.choice_stream import ChoiceStream, StopFilter, cut_at_stop

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def spell(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def play(text: str, *, size: int, stops: list[str] | None = None, calls: bool = False, end: str = "stop") -> tuple:  # type: ignore[type-arg]
    """The content, the calls as a client joins them, and the deltas."""
    stream = ChoiceStream(spell, stops or [], find_format("hermes").stream(False) if calls else None)
    deltas = [stream.feed([ord(c) for c in text[i : i + size]]) for i in range(0, len(text), size)]
    deltas.append(stream.finish(text, end))
    joined: list[dict[str, str]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if part["index"] == len(joined):
            joined.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
        joined[part["index"]]["arguments"] += part["function"]["arguments"]
    return "".join(delta.get("content", "") for delta in deltas), joined, deltas


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_text_comes_as_it_is_written(size: int) -> None:
    content, calls, deltas = play("  two words ", size=size)
    assert (content, calls) == ("  two words ", [])
    assert all(deltas[:-1])


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_text_ends_before_a_stop_string(size: int) -> None:
    content, _, deltas = play("one END two", size=size, stops=["END", "never"])
    assert content == "one "
    assert not any("E" in delta.get("content", "") for delta in deltas)


def test_what_only_looks_like_a_stop_string_is_kept() -> None:
    assert play("an EN", size=1, stops=["END"])[0] == "an EN"
    stop = StopFilter(["aab"])
    assert "".join([stop.feed("aa"), stop.feed("a"), stop.feed("b"), stop.feed("c")]) == "a"
    assert stop.stopped


@pytest.mark.parametrize(
    ("stop", "shown"), [(" ab", ""), (" a", ""), ("ab", ""), (" ", ""), (" b", None), (" a b", None)]
)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_may_begin_with_the_space_that_the_text_leaves_out(
    size: int, stop: str, shown: str | None
) -> None:
    text = "abacb"
    stream = ChoiceStream(spell, [stop], dropped_space=lambda ids: " ")
    deltas = [stream.feed([ord(c) for c in text[i : i + size]]) for i in range(0, len(text), size)]
    content = "".join(delta.get("content", "") for delta in [*deltas, stream.finish(text, "stop")])
    assert content == (text if shown is None else shown)
    assert cut_at_stop(text, [stop], " ") == shown


@pytest.mark.parametrize("size", [1, 7, 200])
def test_calls_come_as_calls_and_their_text_never(size: int) -> None:
    content, calls, _ = play(f"First this. {CALL}", size=size, calls=True)
    assert content == "First this."
    assert calls == [{"id": "call_0", "name": "f", "arguments": '{"a": 1}'}]


def test_arguments_come_piece_by_piece() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "some {long} \\"text\\"", "b": [1, {}]}}</tool_call>'
    _, calls, deltas = play(text, size=1, calls=True)
    assert json.loads(calls[0]["arguments"]) == {"a": 'some {long} "text"', "b": [1, {}]}
    parts = [part["function"]["arguments"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert max(map(len, parts)) == 1
    assert len(parts) > 30


@pytest.mark.parametrize("rest", ["", "}", "}} and more</tool_call>", '}, "name": "g"}</tool_call>', "</tool_call>"])
def test_arguments_of_an_unreadable_call_are_not_closed(rest: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1' + rest
    _, calls, _ = play(text, size=3, calls=True)
    with pytest.raises(ValueError):
        json.loads(calls[0]["arguments"])


def test_a_call_that_is_cut_off_is_not_closed() -> None:
    text = "One. " + CALL[:-14]
    content, calls, _ = play(text, size=2, calls=True, end="length")
    assert (content, calls) == ("One.", [{"id": "call_0", "name": "f", "arguments": '{"a": 1'}])


@pytest.mark.parametrize("size", [1, 200])
def test_a_call_that_is_cut_off_before_its_name_is_text(size: int) -> None:
    text = 'First this. <tool_call>{"na'
    content, calls, _ = play(text, size=size, calls=True, end="length")
    assert (content, calls) == (text, [])


@pytest.mark.parametrize("size", [1, 200])
def test_text_after_a_call_is_kept(size: int) -> None:
    content, calls, _ = play(f"one {CALL} two {CALL} three", size=size, calls=True)
    assert (content, len(calls)) == (find_format("hermes").parse(f"one {CALL} two {CALL} three")[0], 2)


def test_calls_beyond_the_first_are_dropped_where_only_one_is_wanted() -> None:
    stream = ChoiceStream(spell, [], find_format("hermes").stream(False), keep_calls=1)
    deltas = [stream.feed([ord(c) for c in CALL + CALL]), stream.finish(CALL + CALL, "stop")]
    assert {part["index"] for delta in deltas for part in delta.get("tool_calls", ())} == {0}


@pytest.mark.parametrize("size", [1, 200])
def test_a_call_that_a_stop_string_ends_before_its_name_is_text(size: int) -> None:
    text = 'First this. <tool_call>{"na'
    content, calls, _ = play(text + "me", size=size, calls=True, stops=["me"])
    assert (content, calls) == (text, [])
