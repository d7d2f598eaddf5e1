"""Limits on the threads, processes and memory of a worker or program, and the count of leftover processes.

The kernel has no per-worker limit: `RLIMIT_NPROC` covers all processes and threads of a user and does not apply to
root. So they are counted from outside.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.layers.bubblewrap import BwrapProcess
from toolwise.sandbox.layers.hardening import MEBIBYTE, ROOM_FOR_LIBRARIES_MB
from toolwise.sandbox.layers.process_info import read_proc_stat
from toolwise.sandbox.processes import Process
from toolwise.sandbox.supervisor_client import ProcessHandle, SupervisedProcess, last_pid, members_of

START_S = 60.0
"""How long an interpreter may take to start on a busy machine; user code is not running yet."""
CHECK_INTERVAL_S = 0.1
MEASURE_INTERVAL_S = 0.01
"""How often processes are checked, and the folder of a long call: every `CHECK_INTERVAL_S` if the kernel limits its
size, else this."""
MAX_PROCESSES = 64
TOO_MANY_PROCESSES = f"it started more than {MAX_PROCESSES} processes"
MAX_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""Thread pools of numerical libraries start a small multiple of the number of cores."""
TOO_MANY_THREADS = f"it started more than {MAX_THREADS} threads"
MAX_NEW_PIDS = 64
"""Up to this many new pids are checked one by one; beyond that, all processes are scanned."""


def check_processes(process: Process, memory_mb: int, *, children: bool) -> None:
    """Check a worker that runs user code. Raises a `WorkerFault` if its processes exceed a limit."""
    if has_too_many_threads(proc_folders_of(process.popen) if children else [f"/proc/{process.worker}"]):
        raise WorkerFault("too_big", TOO_MANY_THREADS)
    if children and isinstance(process.popen, SupervisedProcess | BwrapProcess):
        max_mb = memory_mb + ROOM_FOR_LIBRARIES_MB
        violation = find_usage_violation(process.popen, max_mb)
        if violation is not None and (
            violation[0] != "memory" or _total_pss_mb(proc_folders_of(process.popen)) > max_mb
        ):
            raise WorkerFault(*violation)


def find_usage_violation(popen: ProcessHandle, max_mb: int) -> tuple[str, str] | None:
    """Fault kind and message if there are too many processes or they use too much memory; else None."""
    proc_folders = _first_proc_folders(popen)
    if len(proc_folders) > MAX_PROCESSES:
        return "too_big", TOO_MANY_PROCESSES
    if sum(map(_private_bytes, proc_folders)) > max_mb * MEBIBYTE:
        return "memory", f"its processes took more than memory_mb ({max_mb}) together"
    return None


def has_too_many_processes(popen: ProcessHandle) -> bool:
    """Check only the number of processes; much faster."""
    return len(_first_proc_folders(popen)) > MAX_PROCESSES


def _first_proc_folders(popen: ProcessHandle) -> list[str]:
    """At most one more than allowed: counting all of a fork bomb would take seconds."""
    return list(islice(proc_folders_of(popen), MAX_PROCESSES + 1))


def proc_folders_of(popen: ProcessHandle) -> Iterator[str]:
    """The /proc folder of each of its processes."""
    if isinstance(popen, BwrapProcess):
        yield from popen.proc_folders()
        return
    if not isinstance(popen, SupervisedProcess):
        yield f"/proc/{popen.pid}"
    yield from (f"/proc/{pid}" for pid in members_of(popen.pid, read_proc_stat(popen.pid).start_ticks))


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


def has_too_many_threads(proc_folders: Iterable[str]) -> bool:
    """Count threads over all processes."""
    count = 0
    for proc_folder in proc_folders:
        with suppress(OSError):
            count += os.stat(f"{proc_folder}/task").st_nlink - 2  # one folder per thread, counted without listing them
        if count > MAX_THREADS:
            return True
    return False


def count_leftovers(process: Process, since: int) -> tuple[int, int]:
    """Number of running processes that a worker started after the pid `since`, and the newest pid on the machine."""
    now, left = last_pid(), 0
    if isinstance(process.popen, SupervisedProcess):
        new_pids = range(since + 1, now + 1) if 0 < since <= now <= since + MAX_NEW_PIDS else None
        pids = members_of(process.popen.pid, among=new_pids)
        left = sum(pid != process.worker and _is_process(pid) for pid in pids)
    elif isinstance(process.popen, BwrapProcess):
        left = max(0, len(process.popen.proc_folders()) - 2)  # bwrap's init and the worker
    return left, now


def _is_process(pid: int) -> bool:
    """Whether `pid` is a process; /proc also resolves thread ids."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_bytes().split(b"\nTgid:")[1].split(None, 1)[0]) == pid
    return False


def oom_kills() -> int:
    """Number of OOM kills on this machine; 0 if the kernel does not report it."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_bytes().split(b"\noom_kill ")[1].split(None, 1)[0])
    return 0
