"""What a program takes while it runs, seen from outside: its processes and their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from toolwise.sandbox.layers.bubblewrap import Monitor
from toolwise.sandbox.layers.hardening import MEBIBYTE
from toolwise.sandbox.processes import born
from toolwise.sandbox.supervision import Running, Supervised, members_of

MOST_PROCESSES = 64
TOO_MANY = f"it started more than {MOST_PROCESSES} processes"


def overgrown(popen: Running, mark: str, most_mb: int) -> tuple[str, str] | None:
    """The kind and the words for a program that has too many processes, or too much memory in all of them."""
    places = _some_places(popen, mark)
    if len(places) > MOST_PROCESSES:
        return "too_big", TOO_MANY
    if sum(map(_private_bytes, places)) > most_mb * MEBIBYTE:
        return "memory", f"its processes took more than memory_mb ({most_mb}) together"
    return None


def too_many(popen: Running, mark: str) -> bool:
    """The same of its processes alone, in a fraction of the time."""
    return len(_some_places(popen, mark)) > MOST_PROCESSES


def _some_places(popen: Running, mark: str) -> list[str]:
    """No more than are too many: the rest of a bomb would take seconds to count."""
    return list(islice(places_of(popen, mark), MOST_PROCESSES + 1))


def places_of(popen: Running, mark: str) -> Iterator[str]:
    """A folder of /proc for each of its processes."""
    if not isinstance(popen, Monitor):
        if not isinstance(popen, Supervised):
            yield f"/proc/{popen.pid}"
        yield from (f"/proc/{pid}" for pid in members_of(popen.pid, mark, born(popen.pid)))
        return
    inside = f"/proc/{popen.init}/root/proc"  # theirs, which lists no others
    with suppress(OSError):
        yield from (f"{inside}/{name}" for name in os.listdir(inside) if name.isdigit())


def _private_bytes(place: str) -> int:
    """What it takes and shares with nobody."""
    try:
        words = Path(f"{place}/statm").read_bytes().split()
        return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
