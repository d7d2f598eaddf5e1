"""Captures what reward functions print: to a log file of bounded size, or as a preview of the first lines."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from toolwise.terminal import escape_controls

FILE_BYTES = 4 << 20
"""Maximum size of a log. A full log is renamed to FILE.1, replacing the previous one."""
CALL_CHARS = 16 * 1024
"""Limit on the output of one call in this process; workers have the same limit."""

PrintCallback = Callable[[str, str], None]
"""Called with a label (such as the step and the rollout) and the printed text."""


def format_lines(label: str, text: str) -> list[str]:
    """The lines of `text`, each prefixed with the label. Control characters are escaped: they could move the cursor."""
    prefix = f"[{label}] " if label else ""
    return [escape_controls(f"{prefix}{line}") for line in text.rstrip("\n").split("\n")]


class PrintLog(RotatingFileHandler):
    """Appends to a file, created at the first print. If the disk is full, log lines are lost but the run continues."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self._printing = threading.Lock()

    def __call__(self, label: str, text: str) -> None:
        with self._printing:
            for line in format_lines(label, text):
                self.handle(logging.makeLogRecord({"msg": line}))

    def _open(self) -> io.TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        pass


class PrintPreview:
    """Keeps the first `max_lines` lines and counts the rest."""

    def __init__(self, max_lines: int) -> None:
        self.lines: list[str] = []
        self.omitted = 0
        self._max_lines = max_lines
        self._lock = threading.Lock()

    def __call__(self, label: str, text: str) -> None:
        lines = format_lines(label, text)
        with self._lock:
            room = self._max_lines - len(self.lines)
            self.lines += lines[:room]
            self.omitted += len(lines[room:])


class _CallOutput(io.StringIO):
    """The output of one call in this process so far."""

    dropped = 0

    def write(self, text: str) -> int:
        room = max(CALL_CHARS - self.tell(), 0)
        self.dropped += len(text[room:])
        return super().write(text[:room])

    def __str__(self) -> str:
        suffix = f"\n… and {self.dropped:,} more characters" if self.dropped else ""
        return f"{self.getvalue()}{suffix}"


_current: ContextVar[_CallOutput | None] = ContextVar("printed_by", default=None)


class _TeeStream:
    """Forwards writes to a stream and also records what the current reward call writes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if (call := _current.get()) is not None:
            call.write(text)
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_tee_count = 0
_streams_lock = threading.Lock()


def _wrap_streams(change: int) -> None:
    """Overlapping uses share one wrapper per stream; the last to exit removes it."""
    global _tee_count
    with _streams_lock:
        _tee_count += change
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _TeeStream) != (_tee_count > 0):
                setattr(sys, name, _TeeStream(stream) if _tee_count else stream.stream)


@contextmanager
def capture_prints(label: str, on_print: PrintCallback | None) -> Iterator[None]:
    """Passes what the enclosed code prints to `on_print`, besides writing it to the terminal.

    Concurrent async calls are kept apart.
    """
    if on_print is None:
        yield
        return
    call = _CallOutput()
    token = _current.set(call)
    _wrap_streams(+1)
    try:
        yield
    finally:
        _wrap_streams(-1)
        _current.reset(token)
        if text := str(call):
            on_print(label, text)
