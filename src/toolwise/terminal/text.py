"""Escapes control characters, so that a terminal shows them instead of interpreting them."""

from __future__ import annotations

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
