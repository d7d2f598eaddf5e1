"""Prints lines and guards the standard streams. Control characters are escaped: a terminal shows them instead of
interpreting them."""

from __future__ import annotations

import io
import sys
import traceback
from contextlib import suppress
from typing import IO, Any

from toolwise.serialization.json_text import json_text
from toolwise.untrusted.bounds import truncate_text

MAX_ERROR_CHARS = 20_000
"""Longer error messages are cut."""
_CONTROL_RANGES = (
    (0x00, 0x08),
    (0x0B, 0x1F),  # all of C0 but tab and line feed: a carriage return overwrites the line
    (0x7F, 0x9F),  # delete and C1, where one character is a whole escape sequence
    (0x2028, 0x2029),  # line and paragraph separators
    (0x202A, 0x202E),
    (0x2060, 0x206F),  # direction changes and invisible operators
    (0xFFF9, 0xFFFB),
    (0xD800, 0xDFFF),  # lone surrogates, which no encoding accepts
    (0xE0000, 0xE007F),  # tags: invisible text
)
_SINGLE = (0x00AD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F, 0xFEFF)
"""Soft hyphen, direction marks, zero-width space, byte-order mark. Joiners stay: scripts and emoji need them."""


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_CODES = [*_SINGLE, *(code for first, last in _CONTROL_RANGES for code in range(first, last + 1))]
_TEXT_ESCAPES = {code: _escape(code) for code in _CODES} | {0x0D: "\\r"}
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in _CODES if code < 0x10000} | {
    code: f"\\ud{0x800 | (code - 0x10000) >> 10:03x}\\ud{0xC00 | (code - 0x10000) & 0x3FF:03x}"
    for code in _CODES
    if code >= 0x10000
}


def escape_controls(value: object) -> str:
    """`value` as text with control characters escaped, valid in UTF-8. Tabs and line feeds stay."""
    text = value if isinstance(value, str) else str(value)
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_TEXT_ESCAPES)


def escape_controls_json(text: str) -> str:
    """The same for JSON text, with JSON escapes: parsing it gives the same value."""
    return text.translate(_JSON_ESCAPES)


def print_line(text: object = "", *, err: bool = False) -> None:
    _write(sys.stderr if err else sys.stdout, f"{escape_controls(text)}\n")


def print_text(text: object) -> None:
    """Print a part of a line, at once."""
    _write(sys.stdout, escape_controls(text))
    sys.stdout.flush()


def write_line(file: IO[str], text: str) -> None:
    """Write a line to a stream that may be closed: a closed pipe must not end a run."""
    with suppress(OSError, ValueError):
        _write(file, f"{escape_controls(text)}\n")


def print_error(text: object) -> None:
    """Print `toolwise: …` as one line to standard error."""
    line = " ".join(escape_controls(text).split())
    print_line(f"toolwise: {truncate_text(line, MAX_ERROR_CHARS)}", err=True)


def print_json(value: Any) -> None:
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
        return getattr(self.stream, "rich_proxied_file", self.stream)

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
