"""What the kernel reports about processes in /proc."""

from __future__ import annotations

import os
from typing import NamedTuple


class ProcStat(NamedTuple):
    """Part of /proc/PID/stat."""

    state: bytes
    parent: int
    group: int
    session: int
    start_ticks: int
    """Start time in kernel clock ticks."""

    @property
    def ended(self) -> bool:
        return self.state in (b"Z", b"X")


GONE = ProcStat(b"X", 0, 0, 0, 0)
"""Of a process that does not exist."""


def list_pids(folder: str = "/proc") -> list[int]:
    return [int(name) for name in os.listdir(folder) if name.isdigit()]


def read_proc_stat(pid: int) -> ProcStat:
    try:
        fields = stat_fields(f"/proc/{pid}/stat")
        return ProcStat(fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return GONE


def is_stopped(pid: int) -> bool:
    """Whether it is stopped (SIGSTOP) or traced."""
    return read_proc_stat(pid).state in (b"T", b"t")


def stat_fields(path: str | bytes) -> list[bytes]:
    """The fields of a `stat` file from the state on; the process name before it may contain any character."""
    return read_small_file(path).rpartition(b")")[2].split()


def read_small_file(path: str | bytes) -> bytes:
    """Faster than `Path.read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
