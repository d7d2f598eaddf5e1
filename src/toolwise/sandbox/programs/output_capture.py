"""Captures what a program prints: the beginning, the end and the number of bytes left out between them."""

from __future__ import annotations

import os

from toolwise.sandbox.faults import sanitize_text

READ_CHUNK_BYTES = 1 << 16


class OutputCapture:
    """Reads a descriptor without blocking and keeps at most `max_bytes`: the first half and the last half."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        self.descriptor = descriptor
        self.total = 0
        self._head_room = max_bytes - max_bytes // 2
        self._tail_room = max_bytes // 2
        self._head, self._tail = bytearray(), bytearray()
        os.set_blocking(descriptor, False)

    def read(self) -> int | None:
        """Read what is available. Returns the number of bytes, or None at end of file."""
        try:
            data = os.read(self.descriptor, READ_CHUNK_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        self.total += len(data)
        room = self._head_room - len(self._head)
        self._head += data[: max(room, 0)]
        self._tail += data[max(room, 0) :]
        if len(self._tail) > self._tail_room:
            del self._tail[: len(self._tail) - self._tail_room]
        return len(data) or None

    def drain(self) -> None:
        """Read what is left in the pipe after the program has ended."""
        while self.read():
            pass

    def text(self) -> str:
        """Decoded as UTF-8; invalid bytes become �."""
        left_out = self.total - len(self._head) - len(self._tail)
        if not left_out:
            return _to_text(self._head + self._tail)
        return f"{_to_text(self._head)}\n[… {left_out:,} bytes left out …]\n{_to_text(self._tail)}"


def _to_text(data: bytearray) -> str:
    text = data.decode("utf-8", "replace")
    return sanitize_text(text, len(text))
