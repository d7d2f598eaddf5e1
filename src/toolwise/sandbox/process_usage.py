"""Counts the processes of a running program and their memory, from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from toolwise.sandbox.layers.bubblewrap import BwrapProcess
from toolwise.sandbox.layers.hardening import MEBIBYTE
from toolwise.sandbox.processes import start_ticks
from toolwise.sandbox.supervisor_client import ProcessHandle, SupervisedProcess, members_of

MAX_PROCESSES = 64
TOO_MANY_PROCESSES = f"it started more than {MAX_PROCESSES} processes"


def find_usage_violation(popen: ProcessHandle, mark: str, max_mb: int) -> tuple[str, str] | None:
    """Fault kind and message if the program has too many processes or they use too much memory; else None."""
    proc_folders = _first_proc_folders(popen, mark)
    if len(proc_folders) > MAX_PROCESSES:
        return "too_big", TOO_MANY_PROCESSES
    if sum(map(_private_bytes, proc_folders)) > max_mb * MEBIBYTE:
        return "memory", f"its processes took more than memory_mb ({max_mb}) together"
    return None


def has_too_many_processes(popen: ProcessHandle, mark: str) -> bool:
    """Check only the number of processes; much faster."""
    return len(_first_proc_folders(popen, mark)) > MAX_PROCESSES


def _first_proc_folders(popen: ProcessHandle, mark: str) -> list[str]:
    """At most one more than allowed: counting all of a fork bomb would take seconds."""
    return list(islice(proc_folders_of(popen, mark), MAX_PROCESSES + 1))


def proc_folders_of(popen: ProcessHandle, mark: str) -> Iterator[str]:
    """The /proc folder of each of its processes."""
    if not isinstance(popen, BwrapProcess):
        if not isinstance(popen, SupervisedProcess):
            yield f"/proc/{popen.pid}"
        yield from (f"/proc/{pid}" for pid in members_of(popen.pid, mark, start_ticks(popen.pid)))
        return
    inside = f"/proc/{popen.init}/root/proc"  # the /proc of their namespace, which lists no others
    with suppress(OSError):
        yield from (f"{inside}/{name}" for name in os.listdir(inside) if name.isdigit())


def _private_bytes(proc_folder: str) -> int:
    """Resident memory that is not shared with other processes."""
    try:
        fields = Path(f"{proc_folder}/statm").read_bytes().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
