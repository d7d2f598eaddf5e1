"""Captured output keeps the beginning, the end and the number of bytes left out."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from toolwise.sandbox.programs.output_capture import OutputCapture


def _capture(pieces: list[bytes], most: int) -> OutputCapture:
    read, write = os.pipe()
    captured = OutputCapture(read, most)
    for piece in pieces:
        os.write(write, piece)
        assert captured.read() is not None or not piece
    os.close(write)
    captured.drain()
    assert captured.read() is None
    os.close(read)
    return captured


@given(st.lists(st.text("abc\n", min_size=1), max_size=10), st.integers(1, 40))
def test_beginning_and_end_are_kept(pieces: list[str], most: int) -> None:
    whole = "".join(pieces)
    text = _capture([piece.encode() for piece in pieces], most).text()
    if len(whole) <= most:
        assert text == whole
    else:
        head, tail = whole[: most - most // 2], whole[len(whole) - most // 2 :]
        assert text == f"{head}\n[… {len(whole) - most:,} bytes left out …]\n{tail}"


def test_reading_never_blocks() -> None:
    read, write = os.pipe()
    assert OutputCapture(read, 10).read() == 0
    os.close(read)
    os.close(write)


def test_invalid_utf8_is_shown() -> None:
    assert _capture([b"a\xff\x80b"], 10).text() == "a��b"
