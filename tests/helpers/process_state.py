"""Whether a process that a test started still runs."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int | str) -> bool:
    """False if it ended, a zombie included. A process can end between opening the file and reading it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
