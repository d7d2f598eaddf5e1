"""How much memory there is, and whether freed memory is kept."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def free_memory() -> int:
    """`available_memory`, or the free pages where the system does not say more. Free pages alone are few on a machine
    whose page cache has grown, though that makes room whenever it must."""
    available = available_memory()
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if available is None else available


def available_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of memory that can be allocated without swapping, in a container within its limit; None if the system
    does not say."""
    amounts = []
    if (system := _read_numbers(meminfo).get("MemAvailable:")) is not None:
        amounts.append(system << 10)
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        amounts.append(limit - used + _read_numbers(group / "memory.stat").get("inactive_file", 0))
    except (OSError, ValueError):  # no group, or no limit ("max")
        pass
    return min(amounts, default=None)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""Parameters of glibc's mallopt."""


def keep_freed_memory() -> bool:
    """Let the process keep up to 512 MB of freed memory for the next tensors, instead of returning it to the system,
    which would provide every page again, filled with zeros: a seventh of the CPU time of long prompts. For a process
    that computes all the time. False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena: those of other threads are small and shrink at once. Threshold for mmap: the largest allowed.
    values = {_ARENA_MAX: 1, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 512 << 20, _TOP_PAD: 64 << 20}
    return bool(sum(mallopt(name, value) for name, value in values.items()) == len(values))


def _read_numbers(file: Path) -> dict[str, int]:
    """The numbers of a file with lines such as `MemAvailable:  123 kB`; empty if there is none."""
    try:
        words = [line.split() for line in file.read_text("ascii").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
