"""What the processes of a worker or a program may take together, their threads first, and which of them are left over.

No limit of the kernel's is a worker's alone: the one of processes and threads (`RLIMIT_NPROC`) is all that a user has,
and none at all for root. So they are counted from outside.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.layers.bubblewrap import BwrapProcess
from toolwise.sandbox.layers.hardening import ROOM_FOR_LIBRARIES_MB
from toolwise.sandbox.process_usage import find_usage_violation
from toolwise.sandbox.processes import Process
from toolwise.sandbox.supervisor_client import ProcessHandle, SupervisedProcess, last_pid, members_of

MAX_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""Thread pools of numerical libraries have as many as there are cores, a few times over."""
MAX_NEW_PIDS = 64
"""Of so many new processes on the machine each is looked at, instead of all that there are."""
TOO_MANY_THREADS = f"it started more than {MAX_THREADS} threads"


def check_processes(process: Process, memory_mb: int, *, children: bool) -> None:
    """Of a worker that has loaded code which is not ours: a `WorkerFault` where its processes take too much."""
    if has_too_many_threads(process.popen, None if children else process.worker):
        raise WorkerFault("too_big", TOO_MANY_THREADS)
    if children and isinstance(process.popen, SupervisedProcess | BwrapProcess):
        max_mb = memory_mb + ROOM_FOR_LIBRARIES_MB
        grown = find_usage_violation(process.popen, process.mark, max_mb)
        if grown is not None and (grown[0] != "memory" or _total_pss_mb(_proc_folders(process.popen, None)) > max_mb):
            raise WorkerFault(*grown)


def _total_pss_mb(proc_folders: Iterable[str]) -> float:
    """What processes take together, with what forks share counted once: slow, and asked for in doubt only."""
    total_kb = 0.0
    for proc_folder in proc_folders:
        try:
            lines = Path(f"{proc_folder}/smaps_rollup").read_bytes().splitlines()
            total_kb += next(float(line.split()[1]) for line in lines if line.startswith(b"Pss:"))
        except FileNotFoundError:  # it has ended
            continue
        except (OSError, StopIteration):
            return math.inf  # nobody may know
    return total_kb / 1024


def has_too_many_threads(popen: ProcessHandle, only_pid: int | None = None) -> bool:
    """Over all of its processes; `only_pid`: the number of the only one."""
    count = 0
    for proc_folder in _proc_folders(popen, only_pid):
        with suppress(OSError):
            count += os.stat(f"{proc_folder}/task").st_nlink - 2  # a folder a thread, counted without a list of them
        if count > MAX_THREADS:
            return True
    return False


def _proc_folders(popen: ProcessHandle, only_pid: int | None) -> Iterable[str]:
    if only_pid is not None:
        return [f"/proc/{only_pid}"]
    if isinstance(popen, SupervisedProcess):
        return (f"/proc/{pid}" for pid in members_of(popen.pid))
    if not isinstance(popen, BwrapProcess):
        return [f"/proc/{popen.pid}"]
    inside = f"/proc/{popen.init}/root/proc"
    with suppress(OSError):
        return [f"{inside}/{name}" for name in os.listdir(inside) if name.isdigit()]
    return []


def count_leftovers(process: Process, since: int) -> tuple[int, int]:
    """How many processes a worker has started that have not ended, since the kernel had given a process the number
    `since`; and the last number that it has given by now."""
    now, left = last_pid(), 0
    if isinstance(process.popen, SupervisedProcess):
        few = range(since + 1, now + 1) if 0 < since <= now <= since + MAX_NEW_PIDS else None
        found = members_of(process.popen.pid, among=few)
        left = sum(pid != process.worker and _is_process(pid) for pid in found)
    elif isinstance(process.popen, BwrapProcess):
        left = max(0, process.popen.count() - 2)  # bwrap's own, and the worker
    return left, now


def _is_process(pid: int) -> bool:
    """And not a thread, which can be looked up by its number too."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_bytes().split(b"\nTgid:")[1].split(None, 1)[0]) == pid
    return False


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_bytes().split(b"\noom_kill ")[1].split(None, 1)[0])
    return 0
