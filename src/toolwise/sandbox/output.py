"""What a worker prints, told apart by call: a mark in the stream on its end, the beginning of each call's on ours.

Whoever prints a mark of their own only confuses the log of their own prints.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from toolwise.sandbox.faults import sanitize_text

MAX_KEPT_BYTES = 16 * 1024
"""Bytes of what one call prints; the rest is read, so that it never waits for us, and counted."""
current_call: ContextVar[int] = ContextVar("call_at", default=-1)
"""In a worker: the position of the call that runs, -1 while its code is loaded."""

_MARK = re.compile(rb"\x1e(\d{1,6})\x1f")
_TORN_MARK = re.compile(rb"\x1e\d{0,6}\Z")


class MarkedStream(io.TextIOWrapper):
    """stdout or stderr in a worker. Says whose print it is whenever that changes."""

    last = -1
    """The position that the last mark named."""

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer, "utf-8", "backslashreplace", line_buffering=True, write_through=True)

    def write(self, text: str) -> int:
        position = current_call.get()
        if position != MarkedStream.last:
            MarkedStream.last = position
            super().write(f"\x1e{position}\x1f" if position >= 0 else "")
        return super().write(text)


class Output:
    """What came out of one worker since `begin`."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, labels: Sequence[str]) -> None:
        """`labels`: one a call, for `take`."""
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
        for position, more in zip(rest[::2], rest[1::2], strict=True):
            self._position = int(position) if int(position) < len(self._labels) else -1
            self._add(more)

    def _add(self, text: bytes) -> None:
        if text:
            kept = self._kept.setdefault(self._position, bytearray())
            room = max(MAX_KEPT_BYTES - len(kept), 0)
            kept += text[:room]
            self._dropped[self._position] = self._dropped.get(self._position, 0) + max(len(text) - room, 0)

    def _text(self, position: int) -> str:
        more = self._dropped[position]
        return self._kept[position].decode("utf-8", "replace") + (f"\n… and {more:,} bytes more" if more else "")

    def format_printed(self, position: int | None = None) -> str:
        """For a traceback: what one call printed, with what cannot be told apart; without a position, what all did."""
        shown = [found for found in sorted(self._kept) if position in (None, found) or found == -1]
        text = "".join(map(self._text, shown))
        return sanitize_text(f"\nIt printed:\n{text}", 2 * MAX_KEPT_BYTES) if text else ""

    def take(self) -> list[tuple[str, str]]:
        """A label and a text for each call that printed, in their order."""
        label = dict(enumerate(self._labels))
        found = [(label.get(position, ""), self._text(position)) for position in sorted(self._kept)]
        self.begin(())
        return found
