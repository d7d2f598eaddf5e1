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

from toolwise.terminal import visible

FILE_BYTES = 4 << 20
"""Of a log; when it is full it becomes FILE.1 in place of the last one, and a new one begins."""
CALL_CHARS = 16 * 1024
"""Of what one call prints in this process; workers have the same bound."""

Printed = Callable[[str, str], None]
"""Is told a label, such as the step and the rollout, and a text."""


def lines_of(label: str, text: str) -> list[str]:
    """One line of text a line, each with its label; control characters, which move a terminal's cursor, as escapes."""
    prefix = f"[{label}] " if label else ""
    return [visible(f"{prefix}{line}") for line in text.rstrip("\n").split("\n")]


class PrintedLog:
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
                    self._file = _QuietFile(self.path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8")
            except OSError:
                return
            for line in lines_of(label, text):
                self._file.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class _QuietFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        pass


class PrintedLines:
    """The first lines, and how many more there were."""

    def __init__(self, most: int) -> None:
        self.lines: list[str] = []
        self.more = 0
        self._most = most
        self._lock = threading.Lock()

    def __call__(self, label: str, text: str) -> None:
        found = lines_of(label, text)
        with self._lock:
            room = self._most - len(self.lines)
            self.lines += found[:room]
            self.more += len(found[room:])


class _Call:
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


_current: ContextVar[_Call | None] = ContextVar("printed_by", default=None)


class _Listening:
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


_listeners = 0
_streams_lock = threading.Lock()


@contextmanager
def listening() -> Iterator[None]:
    """While rewards run in this process: `print` goes where it went, and to whoever keeps it.

    Those that overlap share one wrapper a stream; the last to end takes it off.
    """
    global _listeners
    with _streams_lock:
        _listeners += 1
        for name in ("stdout", "stderr"):
            if not isinstance(stream := getattr(sys, name), _Listening):
                setattr(sys, name, _Listening(stream))
    try:
        yield
    finally:
        with _streams_lock:
            _listeners -= 1
            for name in ("stdout", "stderr"):
                if not _listeners and isinstance(stream := getattr(sys, name), _Listening):
                    setattr(sys, name, stream.stream)


@contextmanager
def kept(label: str, printed: Printed | None) -> Iterator[None]:
    """Tells `printed` what the code inside prints, which may be async; others that run meanwhile are not heard."""
    if printed is None:
        yield
        return
    call = _Call()
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)
        if text := str(call):
            printed(label, text)
