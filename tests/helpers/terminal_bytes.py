"""What of a terminal's input is not text, colours or the cursor movements of rich's own live display."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

OWN = re.compile(
    r"\x1b\[(?:0|1|2|3|4|7|22|23|24|3[0-7]|9[0-7]|39|38;5;\d+|48;5;\d+|38;2;\d+;\d+;\d+|;)*m"  # colours, bold, dim
    r"|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[\d*A|\r(?=\x1b\[|\n|$)"  # a live display is drawn over
)


def foreign(shown: str) -> str:
    """The control characters that are left once our own sequences are taken out."""
    left = OWN.sub("", shown.replace("\r\n", "\n"))
    return "".join(c for c in left if (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" or c in "\u202e\u2066")


def on_terminal(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: object = None, timeout_s: float = 120
) -> tuple[int, str]:
    """The exit status of a command on a terminal of its own, and all that it wrote to it."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=str(cwd) if cwd else None
    )
    os.close(theirs)
    written, late = bytearray(), time.monotonic() + timeout_s
    try:
        while time.monotonic() < late:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            written += chunk
        status = process.wait(timeout=max(1.0, late - time.monotonic()))
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return status, written.decode("utf-8", "surrogateescape")
