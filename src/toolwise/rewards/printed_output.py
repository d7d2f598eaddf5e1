"""What reward functions print: into a file of bounded size, or the first lines for somebody to read."""

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
"""Of a log; when it is full it becomes FILE.1 in place of the last one, and a new one begins."""
CALL_CHARS = 16 * 1024
"""Of what one call prints in this process; workers have the same bound."""

PrintCallback = Callable[[str, str], None]
"""Is told a label, such as the step and the rollout, and a text."""


def format_lines(label: str, text: str) -> list[str]:
    """One line of text a line, each with its label; control characters, which move a terminal's cursor, as escapes."""
    prefix = f"[{label}] " if label else ""
    return [escape_controls(f"{prefix}{line}") for line in text.rstrip("\n").split("\n")]


class PrintLog:
    """Appends to a file, which is not there before something is printed. A disk that is full costs the log, no run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file: RotatingFileHandler | None = None

    def __call__(self, label: str, text: str) -> None:
        with self._lock:
            try:
                if self._file is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = _QuietFileHandler(self.path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8")
            except OSError:
                return
            for line in format_lines(label, text):
                self._file.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class _QuietFileHandler(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        pass


class PrintPreview:
    """The first lines, and how many more there were."""

    def __init__(self, max_lines: int) -> None:
        self.lines: list[str] = []
        self.omitted = 0
        self._max_lines = max_lines
        self._lock = threading.Lock()

    def __call__(self, label: str, text: str) -> None:
        found = format_lines(label, text)
        with self._lock:
            room = self._max_lines - len(self.lines)
            self.lines += found[:room]
            self.omitted += len(found[room:])


class _CallOutput:
    """What one call in this process has printed so far."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.dropped = 0

    def add(self, text: str) -> None:
        room = max(CALL_CHARS - self.text.tell(), 0)
        self.text.write(text[:room])
        self.dropped += len(text[room:])

    def __str__(self) -> str:
        more = f"\n… and {self.dropped:,} characters more" if self.dropped else ""
        return f"{self.text.getvalue()}{more}"


_current: ContextVar[_CallOutput | None] = ContextVar("printed_by", default=None)


class _TeeStream:
    """A stream as it was, that also keeps what a reward writes to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        call = _current.get()
        if call is not None:
            call.add(text)
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_tee_count = 0
_streams_lock = threading.Lock()


@contextmanager
def tee_output() -> Iterator[None]:
    """While rewards run in this process: `print` goes where it went, and to whoever keeps it.

    Those that overlap share one wrapper a stream; the last to end takes it off.
    """
    global _tee_count
    with _streams_lock:
        _tee_count += 1
        for name in ("stdout", "stderr"):
            if not isinstance(stream := getattr(sys, name), _TeeStream):
                setattr(sys, name, _TeeStream(stream))
    try:
        yield
    finally:
        with _streams_lock:
            _tee_count -= 1
            for name in ("stdout", "stderr"):
                if not _tee_count and isinstance(stream := getattr(sys, name), _TeeStream):
                    setattr(sys, name, stream.stream)


@contextmanager
def capture_prints(label: str, on_print: PrintCallback | None) -> Iterator[None]:
    """Tells `printed` what the code inside prints, which may be async; others that run meanwhile are not heard."""
    if on_print is None:
        yield
        return
    call = _CallOutput()
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)
        if text := str(call):
            on_print(label, text)
