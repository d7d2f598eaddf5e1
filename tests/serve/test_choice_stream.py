"""Pieces of a choice: joined, they are the message; a stop string is never shown, not even its start."""

from __future__ import annotations

import pytest

from toolwise.rollout.call_format import find_format
from toolwise.serve.choice_stream import ChoiceStream, StopFilter

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def spell(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def play(text: str, *, size: int, stops: list[str] | None = None, calls: bool = False, end: str = "stop") -> tuple:  # type: ignore[type-arg]
    stream = ChoiceStream(spell, stops or [], find_format("hermes").stream(False) if calls else None)
    pieces = [stream.feed([ord(c) for c in text[i : i + size]]) for i in range(0, len(text), size)]
    rest = stream.finish(text, end)
    return "".join(pieces) + rest.pop("content", ""), rest, pieces


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_text_comes_as_it_is_written(size: int) -> None:
    content, rest, pieces = play("  two words ", size=size)
    assert (content, rest) == ("  two words ", {})
    assert len([p for p in pieces if p]) == len(pieces)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_text_ends_before_a_stop_string(size: int) -> None:
    content, _, pieces = play("one END two", size=size, stops=["END", "never"])
    assert content == "one "
    assert not any("E" in piece for piece in pieces)


def test_what_only_looks_like_a_stop_string_is_kept() -> None:
    assert play("an EN", size=1, stops=["END"])[0] == "an EN"
    stop = StopFilter(["aab"])
    assert "".join([stop.feed("aa"), stop.feed("a"), stop.feed("b"), stop.feed("c")]) == "a"
    assert stop.stopped


@pytest.mark.parametrize("size", [1, 7, 200])
def test_calls_come_at_the_end_and_their_text_never(size: int) -> None:
    content, rest, _ = play(f"First this. {CALL}", size=size, calls=True)
    assert content == "First this."
    assert [call["function"]["name"] for call in rest["tool_calls"]] == ["f"]


@pytest.mark.parametrize("size", [1, 200])
def test_calls_of_a_reply_that_was_cut_off_are_text(size: int) -> None:
    text = f"First this. {CALL} and {CALL[:9]}"
    content, rest, _ = play(text, size=size, calls=True, end="length")
    assert (content, rest) == (text, {})


@pytest.mark.parametrize("size", [1, 200])
def test_text_after_a_call_is_kept(size: int) -> None:
    content, rest, _ = play(f"one {CALL} two {CALL} three", size=size, calls=True)
    assert (content, len(rest["tool_calls"])) == (find_format("hermes").parse(f"one {CALL} two {CALL} three")[0], 2)
