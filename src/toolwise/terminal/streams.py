"""Lines for people, and standard streams that show control characters instead of passing them on."""

from __future__ import annotations

import io
import sys
import traceback
from contextlib import suppress
from typing import IO, Any

from toolwise.serialization.json_text import json_text
from toolwise.terminal.text import escape_controls, escape_controls_json

MAX_ERROR_CHARS = 20_000
"""Characters of an error message; a person reads the beginning of more."""


def print_line(text: object = "", *, err: bool = False) -> None:
    """A line on standard output, or on standard error."""
    _write(sys.stderr if err else sys.stdout, f"{escape_controls(text)}\n")


def write_line(file: IO[str], text: str) -> None:
    """A line to a stream that may be gone: a closed pipe does not end a run."""
    with suppress(OSError, ValueError):
        _write(file, f"{escape_controls(text)}\n")


def print_error(text: object) -> None:
    """`toolwise: …`, one line on standard error."""
    line = " ".join(escape_controls(text).split())
    cut = f"{line[:MAX_ERROR_CHARS]} … cut, {len(line) - MAX_ERROR_CHARS:,} characters"
    print_line(f"toolwise: {line if len(line) <= MAX_ERROR_CHARS else cut}", err=True)


def print_json(value: Any) -> None:
    """A value as JSON on standard output, for people and programs."""
    _write(sys.stdout, escape_controls_json(json_text(value, indent=2)) + "\n")


def print_traceback(fault: BaseException) -> None:
    """As Python tells it, on standard error."""
    print_line("".join(traceback.format_exception(fault)).rstrip("\n"), err=True)


def guard_streams() -> None:
    """From now on whatever this process prints, by whoever's hand, shows control characters and obeys none.

    Rich's consoles write past the guard: they know which escapes are their own.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


class GuardedStream(io.TextIOBase):
    """A text stream that makes control characters visible, and writes `?` for what its encoding does not have."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    @property
    def rich_proxied_file(self) -> IO[str]:
        """Where rich writes instead of here."""
        return self.stream

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        _write_encodable(self.stream, escape_controls(text))
        return len(text)

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

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self.stream, "errors", None)

    def close(self) -> None:
        """The stream is its owner's to close."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _write(stream: IO[str], text: str) -> None:
    _write_encodable(stream, text)
    stream.flush()


def _write_encodable(stream: IO[str], text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding, "replace"))
