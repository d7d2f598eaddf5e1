"""Length-prefixed JSON frames between the trainer and a worker, on a separate descriptor. Content is untrusted."""

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
    """Plain ASCII, so that lone surrogates survive. NaN and infinities are written as Python writes them."""
    return json.dumps(value, separators=(",", ":"), default=to_jsonable_python).encode("ascii")


def to_frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def read_exactly(descriptor: int, count: int) -> bytes:
    """Blocks; fewer bytes mean that the other side has closed."""
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
    """Parses frames from a byte stream that may be hostile."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Any:
        """The next message, or None if it is not complete yet."""
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
            raise WorkerFault("bad_type", "the worker sent something that is not valid JSON") from None
        if not isinstance(message, dict):
            raise WorkerFault("bad_type", f"the worker sent a {type(message).__name__} instead of an object")
        return message

    @property
    def torn(self) -> bool:
        """Whether an incomplete frame is left."""
        return bool(self._buffer)
