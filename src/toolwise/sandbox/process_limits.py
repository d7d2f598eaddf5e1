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
from toolwise.sandbox.layers.bubblewrap import Monitor
from toolwise.sandbox.layers.hardening import ROOM_FOR_LIBRARIES_MB
from toolwise.sandbox.processes import Process
from toolwise.sandbox.supervision import Running, Supervised, members_of
from toolwise.sandbox.usage import overgrown

MOST_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""Thread pools of numerical libraries have as many as there are cores, a few times over."""
TOO_MANY_THREADS = f"it started more than {MOST_THREADS} threads"


def check_processes(process: Process, memory_mb: int, *, children: bool) -> None:
    """Of a worker that has loaded code which is not ours: a `WorkerFault` where its processes take too much."""
    if too_many_threads(process.popen, None if children else process.worker):
        raise WorkerFault("too_big", TOO_MANY_THREADS)
    if children and isinstance(process.popen, Supervised | Monitor):
        most_mb = memory_mb + ROOM_FOR_LIBRARIES_MB
        grown = overgrown(process.popen, process.mark, most_mb)
        if grown is not None and (grown[0] != "memory" or _taken_mb(_places(process.popen, None)) > most_mb):
            raise WorkerFault(*grown)


def _taken_mb(places: Iterable[str]) -> float:
    """What processes take together, with what forks share counted once: slow, and asked for in doubt only."""
    total_kb = 0.0
    for place in places:
        try:
            lines = Path(f"{place}/smaps_rollup").read_bytes().splitlines()
            total_kb += next(float(line.split()[1]) for line in lines if line.startswith(b"Pss:"))
        except FileNotFoundError:  # it has ended
            continue
        except (OSError, StopIteration):
            return math.inf  # nobody may know
    return total_kb / 1024


def too_many_threads(popen: Running, alone: int | None = None) -> bool:
    """Over all of its processes; `alone`: the number of the only one."""
    count = 0
    for place in _places(popen, alone):
        with suppress(OSError):
            count += os.stat(f"{place}/task").st_nlink - 2  # a folder a thread, counted without a list of them
        if count > MOST_THREADS:
            return True
    return False


def _places(popen: Running, alone: int | None) -> Iterable[str]:
    if alone is not None:
        return [f"/proc/{alone}"]
    if isinstance(popen, Supervised):
        return (f"/proc/{pid}" for pid in members_of(popen.pid))
    if not isinstance(popen, Monitor):
        return [f"/proc/{popen.pid}"]
    inside = f"/proc/{popen.init}/root/proc"
    with suppress(OSError):
        return [f"{inside}/{name}" for name in os.listdir(inside) if name.isdigit()]
    return []


def left_running(process: Process) -> int:
    """How many processes a worker has started that have not ended."""
    if isinstance(process.popen, Supervised):
        return sum(pid != process.worker for pid in members_of(process.popen.pid))
    return max(0, process.popen.count() - 2) if isinstance(process.popen, Monitor) else 0  # bwrap's own, and the worker


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_bytes().split(b"\noom_kill ")[1].split(None, 1)[0])
    return 0
