"""Complete frames are parsed however they arrive; anything else is a typed fault."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.sandbox import wire
from toolwise.sandbox.faults import WorkerFault

VALUES = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=20), max_size=4
)


@given(st.lists(VALUES, min_size=1, max_size=4), st.lists(st.integers(1, 30), max_size=40))
def test_frames_can_arrive_in_pieces(values: list[dict[str, object]], cuts: list[int]) -> None:
    data = b"".join(wire.to_frame(wire.encode(value)) for value in values)
    incoming, got = wire.FrameReader(10_000), []
    for cut in [*cuts, len(data)]:
        incoming.feed(data[:cut])
        data = data[cut:]
        while (message := incoming.next()) is not None:
            got.append(message)
    assert got == values
    assert not incoming.torn


@pytest.mark.parametrize(("payload", "kind"), [(b"[]", "bad_type"), (b"\xff", "bad_type"), (b"[" * 99_999, "bad_type")])
def test_invalid_messages_are_faults(payload: bytes, kind: str) -> None:
    incoming = wire.FrameReader(1 << 20)
    incoming.feed(wire.to_frame(payload))
    with pytest.raises(WorkerFault) as caught:
        incoming.next()
    assert caught.value.kind == kind


def test_a_frame_that_promises_too_much_is_refused_at_once() -> None:
    incoming = wire.FrameReader(100)
    incoming.feed(wire.HEADER.pack(101))
    with pytest.raises(WorkerFault, match="limit is 100") as caught:
        incoming.next()
    assert caught.value.kind == "too_big"


def test_surrogates_and_odd_numbers_survive() -> None:
    incoming = wire.FrameReader(1000)
    incoming.feed(wire.to_frame(wire.encode({"a": "\ud800", "b": float("inf")})))
    assert incoming.next() == {"a": "\ud800", "b": float("inf")}


def test_reading_stops_at_end_of_file() -> None:
    read, write = os.pipe()
    wire.write_all(write, b"abc")
    os.close(write)
    assert wire.read_exactly(read, 10) == b"abc"
    os.close(read)
