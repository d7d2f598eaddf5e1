"""Detects whether a worker computes, from the CPU time that it and its descendants used or waited for.

Process states alone would miss a call that naps between computations, and a subprocess that computes for it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from toolwise.sandbox.layers.kernel import read_small_file, stat_fields

MIN_CPU_SHARE = 0.2
"""A call that needs less than this share of one core counts as sleeping."""
MAX_TASKS = 64
"""Maximum number of a call's processes and threads that are inspected."""
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class _Reading:
    tasks_ns: dict[bytes, int] = field(default_factory=dict)
    """Per thread: time running plus time waiting for a core."""
    ended_ns: int = 0
    """CPU time of child processes that have ended."""
    running: bool = False
    """Whether a thread is running or waiting for a core now; the kernel accounts for that time only afterwards."""


class CpuUsage:
    """CPU usage of one process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._at, self._last = time.monotonic(), _read(pid)

    def is_computing(self, since: float) -> bool:
        """Whether they needed more than `MIN_CPU_SHARE` of a core since the last check, or since `since` if that is
        later (before it they were idle)."""
        now, reading, last = time.monotonic(), _read(self._pid), self._last
        interval_ns = (now - max(self._at, since)) * 1e9
        self._at, self._last = now, reading
        used_ns = sum(max(0, ns - last.tasks_ns.get(task, 0)) for task, ns in reading.tasks_ns.items())
        used_ns += max(0, reading.ended_ns - last.ended_ns)
        return not reading.tasks_ns or reading.running or used_ns > MIN_CPU_SHARE * interval_ns


def _read(pid: int) -> _Reading:
    reading, processes = _Reading(), [b"%d" % pid]
    while processes and len(reading.tasks_ns) < MAX_TASKS:
        process = processes.pop()
        folder = b"/proc/%s/task/" % process
        try:
            words = stat_fields(b"/proc/%s/stat" % process)
            reading.ended_ns += sum(map(int, words[13:15])) * _TICK_NS
            for task in os.listdir(folder)[:MAX_TASKS]:
                task_words = words if task == process else stat_fields(folder + task + b"/stat")
                reading.running |= task_words[0] == b"R"
                reading.tasks_ns[task] = _cpu_demand_ns(folder + task, task_words)
                processes += read_small_file(folder + task + b"/children").split()
        except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not list children
            continue
    return reading


def _cpu_demand_ns(folder: bytes, words: list[bytes]) -> int:
    try:
        ran, waited, _ = read_small_file(folder + b"/schedstat").split()
        return int(ran) + int(waited)
    except FileNotFoundError:  # this kernel does not report waiting time
        return sum(map(int, words[11:13])) * _TICK_NS
