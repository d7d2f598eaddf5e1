"""Attributes a worker's printed output to its calls.

The worker writes a marker whenever the current call changes; the trainer splits the stream at the markers and keeps the
beginning of each call's output. Code that prints a marker itself only confuses the log of its own output.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from toolwise.sandbox.faults import sanitize_text

MAX_KEPT_BYTES = 16 * 1024
"""Bytes kept per call. The rest is read, so that the worker never blocks on us, and counted."""
current_call: ContextVar[int] = ContextVar("call_at", default=-1)
"""In a worker: the position of the running call; -1 while user code is being loaded."""

_MARK = re.compile(rb"\x1e(\d{1,6})\x1f")
_TORN_MARK = re.compile(rb"\x1e\d{0,6}\Z")


class MarkedStream(io.TextIOWrapper):
    """stdout or stderr of a worker. Writes a marker whenever the current call changes."""

    last = -1
    """The position in the last marker."""

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer, "utf-8", "backslashreplace", line_buffering=True, write_through=True)

    def write(self, text: str) -> int:
        position = current_call.get()
        if position != MarkedStream.last:
            MarkedStream.last = position
            super().write(f"\x1e{position}\x1f" if position >= 0 else "")
        return super().write(text)


class Output:
    """The output of one worker since `begin`."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, labels: Sequence[str]) -> None:
        """`labels`: one per call, for `take`."""
        self._labels = labels
        self._kept: dict[int, bytearray] = {}
        self._dropped: dict[int, int] = {}
        self._position = 0 if len(labels) == 1 else -1
        self._torn = b""

    def feed(self, data: bytes) -> None:
        data = self._torn + data
        torn = _TORN_MARK.search(data)
        self._torn = torn[0] if torn else b""
        text, *rest = _MARK.split(data[: len(data) - len(self._torn)])
        self._add(text)
        for position, chunk in zip(rest[::2], rest[1::2], strict=True):
            self._position = int(position) if int(position) < len(self._labels) else -1
            self._add(chunk)

    def _add(self, text: bytes) -> None:
        if text:
            kept = self._kept.setdefault(self._position, bytearray())
            room = max(MAX_KEPT_BYTES - len(kept), 0)
            kept += text[:room]
            self._dropped[self._position] = self._dropped.get(self._position, 0) + max(len(text) - room, 0)

    def _text(self, position: int) -> str:
        dropped = self._dropped[position]
        return self._kept[position].decode("utf-8", "replace") + (f"\n… and {dropped:,} bytes more" if dropped else "")

    def format_printed(self, position: int | None = None) -> str:
        """For a traceback: the output of one call plus output without a known call; without a position, all output."""
        shown = [key for key in sorted(self._kept) if position in (None, key) or key == -1]
        text = "".join(map(self._text, shown))
        return sanitize_text(f"\nIt printed:\n{text}", 2 * MAX_KEPT_BYTES) if text else ""

    def take(self) -> list[tuple[str, str]]:
        """A label and a text for each call that printed, in call order."""
        label = dict(enumerate(self._labels))
        texts = [(label.get(position, ""), self._text(position)) for position in sorted(self._kept)]
        self.begin(())
        return texts
