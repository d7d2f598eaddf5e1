"""All terminal output. Control characters in text from data, models, tools and exceptions are escaped.

`streams` escapes control characters, prints lines and guards the standard streams, `display` holds rich's console with
the same rule. Nothing else in the package prints (tests/test_architecture.py).
"""

from toolwise.terminal.streams import (
    escape_controls,
    guard_streams,
    print_error,
    print_json,
    print_line,
    print_text,
    write_line,
)

__all__ = ["escape_controls", "guard_streams", "print_error", "print_json", "print_line", "print_text", "write_line"]
