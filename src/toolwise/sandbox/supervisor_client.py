"""The trainer's end of a supervisor process (`layers/supervisor.py`), and the processes below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress

from toolwise.sandbox.layers.bubblewrap import BwrapProcess
from toolwise.sandbox.layers.descriptors import wait_ready
from toolwise.sandbox.layers.process_info import list_pids, read_proc_stat, read_small_file

SUPERVISOR_END_S = 15.0
"""How long a supervisor may take to kill its descendants."""
SUPERVISION_AVAILABLE = sys.platform == "linux"


class ReportPipe:
    """A pipe on which a supervisor reports how many processes its child left running."""

    def __init__(self, ours: ExitStack, theirs: ExitStack) -> None:
        self.ours, self.theirs = os.pipe()
        ours.callback(self.close)
        theirs.callback(os.close, self.theirs)

    def read_count(self) -> int | None:
        """The reported count; None if the supervisor was killed before. Call once, after it has ended."""
        os.set_blocking(self.ours, False)
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self.ours, 64)
        self.close()
        count = data.partition(b" ")[2]
        return int(count) if count.isdigit() else None

    def close(self) -> None:
        read, self.ours = self.ours, -1
        if read >= 0:
            os.close(read)


class SupervisedProcess:
    """A supervisor with the interface of its program's `Popen`: it ends after the program, with the same status."""

    def __init__(self, popen: subprocess.Popen[bytes], report: ReportPipe) -> None:
        self._popen, self._report = popen, report
        self.leftover_count: int | None = None
        """Number of processes still running when the program ended; None if unknown."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def poll(self) -> int | None:
        return self._popen.poll()

    def ask_to_end(self) -> None:
        if self._popen.returncode is None:  # until wait() its pid cannot be reused
            ask_supervisor_to_end(self.pid)

    def end(self) -> int:
        """End the supervisor and its descendants, and wait. Returns the program's exit code."""
        self.ask_to_end()
        if not wait_ready(self._report.ours, SUPERVISOR_END_S, 0):  # something keeps it from finishing
            for pid in members_of(self.pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._popen.kill()
        code = self._popen.wait()
        self.leftover_count = self._report.read_count()
        return code

    def close_fds(self) -> None:
        self._report.close()


def ask_supervisor_to_end(pid: int) -> None:
    for number in (signal.SIGCONT, signal.SIGTERM):
        with suppress(OSError):
            os.kill(pid, number)


ProcessHandle = subprocess.Popen[bytes] | BwrapProcess | SupervisedProcess


def members_of(ancestor: int, since: int = 0, among: Iterable[int] | None = None) -> Iterator[int]:
    """The running descendants of a process.

    Yields lazily, so that a caller can stop early on a fork bomb. `since`: skip older processes (in clock ticks).
    `among`: the pids to check; all by default.
    """
    is_member = {ancestor: True, 0: False, 1: False, os.getpid(): False}

    def belongs(pid: int) -> bool:
        chain = []
        while pid not in is_member:
            chain.append(pid)
            stat = read_proc_stat(pid)
            pid = stat.parent if stat.start_ticks >= since else 0
        is_member.update(dict.fromkeys(chain, is_member[pid]))
        return is_member[pid]

    for pid in sorted(list_pids(), reverse=True) if among is None else among:
        if pid != ancestor and belongs(pid) and not read_proc_stat(pid).ended:
            yield pid


def last_pid() -> int:
    """The most recent pid or thread id on this machine; 0 if the kernel does not report it."""
    try:
        return int(read_small_file("/proc/loadavg").split()[4])
    except (OSError, ValueError, IndexError):
        return 0
