"""Tokens become text piece by piece: joined, the pieces are the whole text, and no character comes in halves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.rollout.text_stream import TextStream


def decode(ids: Sequence[int]) -> str:
    """Tokens are bytes."""
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=40), st.integers(1, 5))
def test_the_pieces_are_the_text(text: str, size: int) -> None:
    pieces: list[str] = []
    stream, ids = TextStream(decode, pieces.append), list(text.encode())
    for start in range(0, len(ids), size):
        stream.add(ids[start : start + size])
    stream.finish(text)
    assert "".join(pieces) == text


def test_no_character_comes_in_halves() -> None:
    pieces: list[str] = []
    stream = TextStream(decode, pieces.append)
    for byte in "aé€😀b".encode():
        stream.add([byte])
    assert pieces == ["a", "é", "€", "😀", "b"]


@pytest.mark.parametrize("tokens", [100, 1000])
def test_the_work_is_linear(tokens: int) -> None:
    decoded = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    stream = TextStream(counting, lambda piece: None)
    for _ in range(tokens):
        stream.add(b"x")
    assert decoded <= 4 * tokens


def test_a_space_that_only_stands_between_tokens_is_kept() -> None:
    """Some tokenizers write a space before a word, but not before the first."""

    def words(ids: Sequence[int]) -> str:
        return " ".join("ab"[i] for i in ids)

    pieces: list[str] = []
    stream = TextStream(words, pieces.append)
    for token in (0, 1, 0):
        stream.add([token])
    stream.finish("a b a")
    assert "".join(pieces) == "a b a"
