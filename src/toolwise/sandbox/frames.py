"""Length-framed JSON on a descriptor of its own: how the trainer and a worker talk. Nothing in it is trusted."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

from pydantic_core import to_jsonable_python

from toolwise.sandbox.faults import WorkerFault

HEADER = struct.Struct("!I")
_read, _write = os.read, os.write


def encode(value: Any) -> bytes:
    """Plain ASCII, so that lone surrogates survive; numbers that JSON has no word for are written as Python's."""
    return json.dumps(value, separators=(",", ":"), default=to_jsonable_python).encode("ascii")


def to_frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def read_exactly(descriptor: int, count: int) -> bytes:
    """Blocks; fewer bytes mean that the other side is gone."""
    parts: list[bytes] = []
    while count:
        part = _read(descriptor, min(count, 1 << 20))
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[_write(descriptor, view) :]


class FrameReader:
    """Frames out of a stream of bytes that somebody hostile may have written."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Any:
        """The next message; None where it is not there in full yet."""
        if len(self._buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._buffer)
        if length > self.max_bytes:
            raise WorkerFault("too_big", f"the result has {length:,} bytes; the limit is {self.max_bytes:,}")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            raise WorkerFault("bad_type", "what came back from the worker is no JSON") from None
        if not isinstance(message, dict):
            raise WorkerFault("bad_type", f"what came back from the worker is a {type(message).__name__}")
        return message

    @property
    def torn(self) -> bool:
        """Whether something is left that is no whole frame."""
        return bool(self._buffer)
