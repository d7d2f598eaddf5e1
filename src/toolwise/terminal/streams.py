"""Prints lines, and guards the standard streams so that control characters are escaped."""

from __future__ import annotations

import io
import sys
import traceback
from contextlib import suppress
from typing import IO, Any

from toolwise.serialization.json_text import json_text
from toolwise.terminal.text import escape_controls, escape_controls_json

MAX_ERROR_CHARS = 20_000
"""Longer error messages are cut."""


def print_line(text: object = "", *, err: bool = False) -> None:
    """Print a line to standard output, or to standard error."""
    _write(sys.stderr if err else sys.stdout, f"{escape_controls(text)}\n")


def write_line(file: IO[str], text: str) -> None:
    """Write a line to a stream that may be closed: a closed pipe must not end a run."""
    with suppress(OSError, ValueError):
        _write(file, f"{escape_controls(text)}\n")


def print_error(text: object) -> None:
    """Print `toolwise: …` as one line to standard error."""
    line = " ".join(escape_controls(text).split())
    cut = f"{line[:MAX_ERROR_CHARS]} … cut, {len(line) - MAX_ERROR_CHARS:,} characters"
    print_line(f"toolwise: {line if len(line) <= MAX_ERROR_CHARS else cut}", err=True)


def print_json(value: Any) -> None:
    """Print a value as JSON to standard output."""
    _write(sys.stdout, escape_controls_json(json_text(value, indent=2)) + "\n")


def print_traceback(fault: BaseException) -> None:
    """Print a traceback to standard error, as Python does."""
    print_line("".join(traceback.format_exception(fault)).rstrip("\n"), err=True)


def guard_streams() -> None:
    """From now on, escape control characters in everything this process prints.

    Rich's consoles bypass the guard, as they know which escapes are their own.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


class StreamProxy(io.TextIOBase):
    """A text stream in front of another one."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    @property
    def rich_proxied_file(self) -> IO[str]:
        """The stream that rich writes to instead of this one."""
        inner: IO[str] = getattr(self.stream, "rich_proxied_file", self.stream)
        return inner

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class GuardedStream(StreamProxy):
    """A text stream that escapes control characters and writes `?` for what its encoding lacks."""

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        _write_encodable(self.stream, escape_controls(text))
        return len(text)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self.stream, "errors", None)

    def close(self) -> None:
        """Does nothing: the owner closes the stream."""


def _write(stream: IO[str], text: str) -> None:
    _write_encodable(stream, text)
    stream.flush()


def _write_encodable(stream: IO[str], text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding, "replace"))
