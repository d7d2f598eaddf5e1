"""Limits on the threads, processes and memory of a worker or program, and the count of leftover processes.

The kernel has no per-worker limit: `RLIMIT_NPROC` covers all processes and threads of a user and does not apply to
root. So they are counted from outside.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.layers.hardening import MEBIBYTE, ROOM_FOR_LIBRARIES_MB
from toolwise.sandbox.process_tree import ProcessTree, last_pid
from toolwise.sandbox.processes import Process

START_S = 60.0
"""How long an interpreter may take to start on a busy machine; user code is not running yet."""
CHECK_INTERVAL_S = 0.1
MEASURE_INTERVAL_S = 0.01
"""How often processes are checked, and the folder of a long call: every `CHECK_INTERVAL_S` if the kernel limits its
size, else this."""
MAX_PROCESSES = 64
MAX_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""Thread pools of numerical libraries start a small multiple of the number of cores."""
MAX_NEW_PIDS = 64
"""Up to this many new pids are checked one by one; beyond that, all processes are scanned."""


def check_processes(process: Process, memory_mb: int, *, children: bool) -> None:
    """Check a worker that runs user code. Raises a `WorkerFault` if its processes exceed a limit."""
    if children:
        check_memory(process.popen, memory_mb + ROOM_FOR_LIBRARIES_MB, confirm=True)
    check_threads(process.popen.proc_folders() if children else [f"/proc/{process.worker}"])


def check_memory(popen: ProcessTree, max_mb: int, *, confirm: bool = False) -> None:
    """Raises a `WorkerFault` if there are too many processes or they use too much memory together.

    `confirm`: memory that forks share counts once.
    """
    proc_folders = check_process_count(popen)
    if sum(map(_private_bytes, proc_folders)) > max_mb * MEBIBYTE and not (
        confirm and _total_pss_mb(popen.proc_folders()) <= max_mb
    ):
        raise WorkerFault("memory", f"its processes took more than memory_mb ({max_mb}) together")


def check_process_count(popen: ProcessTree) -> list[str]:
    """The /proc folders. Lists at most one more than allowed: counting all of a fork bomb would take seconds."""
    proc_folders = list(islice(popen.proc_folders(), MAX_PROCESSES + 1))
    if len(proc_folders) > MAX_PROCESSES:
        raise _too_many_processes()
    return proc_folders


def _too_many_processes() -> WorkerFault:
    return WorkerFault("too_big", f"it started more than {MAX_PROCESSES} processes")


def _private_bytes(proc_folder: str) -> int:
    """Resident memory that is not shared with other processes."""
    try:
        fields = Path(f"{proc_folder}/statm").read_bytes().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _total_pss_mb(proc_folders: Iterable[str]) -> float:
    """Total memory of the processes, with pages shared by forks counted once. Slow, so only used in doubt."""
    total_kb = 0.0
    for proc_folder in proc_folders:
        try:
            lines = Path(f"{proc_folder}/smaps_rollup").read_bytes().splitlines()
            total_kb += next(float(line.split()[1]) for line in lines if line.startswith(b"Pss:"))
        except FileNotFoundError:  # it has ended
            continue
        except (OSError, StopIteration):
            return math.inf  # not permitted to know
    return total_kb / 1024


def check_threads(proc_folders: Iterable[str]) -> None:
    """Raises a `WorkerFault` if the processes have too many threads together.

    Each process has a thread: what has become a fork bomb since its processes were counted is called one.
    """
    count = 0
    for number, proc_folder in enumerate(proc_folders, start=1):
        if number > MAX_PROCESSES:
            raise _too_many_processes()
        with suppress(OSError):
            count += os.stat(f"{proc_folder}/task").st_nlink - 2  # one folder per thread, counted without listing them
        if count > MAX_THREADS:
            raise WorkerFault("too_big", f"it started more than {MAX_THREADS} threads")


def count_leftovers(process: Process, since: int) -> tuple[int, int]:
    """Number of running processes that a worker started after the pid `since`, and the newest pid on the machine."""
    now = last_pid()
    new_pids = range(since + 1, now + 1) if 0 < since <= now <= since + MAX_NEW_PIDS else None
    return process.popen.count_others(process.worker, new_pids), now


def oom_kills() -> int:
    """Number of OOM kills on this machine; 0 if the kernel does not report it."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_bytes().split(b"\noom_kill ")[1].split(None, 1)[0])
    return 0
