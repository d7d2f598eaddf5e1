"""The trainer's end of a supervisor process (`layers/supervisor.py`), and helpers that read /proc."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

from toolwise.sandbox.layers.bubblewrap import BwrapProcess

SUPERVISOR_END_S = 15.0
"""How long a supervisor may take to kill its descendants."""
SUPERVISION_AVAILABLE = sys.platform == "linux"


class ReportPipe:
    """A pipe on which a supervisor reports how many processes its child left running."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()

    def close_child_end(self) -> None:
        """Call once the supervisor has inherited its end."""
        os.close(self.theirs)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the supervisor has ended. False on timeout."""
        poll = select.poll()
        poll.register(self.ours, 0)  # ready (POLLHUP) when the last writer has closed
        return bool(poll.poll(timeout_s * 1000))

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
            for number in (signal.SIGCONT, signal.SIGTERM):
                with suppress(OSError):
                    os.kill(self.pid, number)

    def end(self) -> int:
        """End the supervisor and its descendants, and wait. Returns the program's exit code."""
        self.ask_to_end()
        if not self._report.wait(SUPERVISOR_END_S):  # something keeps it from finishing
            for pid in members_of(self.pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._popen.kill()
        code = self._popen.wait()
        self.leftover_count = self._report.read_count()
        return code

    def close_fds(self) -> None:
        self._report.close()


ProcessHandle = subprocess.Popen[bytes] | BwrapProcess | SupervisedProcess


def members_of(ancestor: int, mark: str = "", since: int = 0, among: Iterable[int] | None = None) -> Iterator[int]:
    """The running descendants of a process.

    Yields lazily, so that a caller can stop early on a fork bomb. `since`: skip older processes (in clock ticks).
    `among`: the pids to check; all by default.
    """
    is_member = {ancestor: True, 0: False, 1: False, os.getpid(): False}

    def belongs(pid: int) -> bool:
        chain = []
        while pid not in is_member:
            chain.append(pid)
            try:
                _, pid, _, started = read_proc_stat(pid)
            except (OSError, ValueError, IndexError):
                pid = 0
                break
            if started < since:
                pid = 0
        is_member.update(dict.fromkeys(chain, is_member[pid]))
        return is_member[pid]

    if among is None:
        among = sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)
    for pid in among:
        if pid != ancestor and belongs(pid):
            with suppress(OSError, ValueError, IndexError):
                if read_proc_stat(pid)[0] not in (b"Z", b"X"):
                    yield pid


def last_pid() -> int:
    """The most recent pid or thread id on this machine; 0 if the kernel does not report it."""
    try:
        descriptor = os.open("/proc/loadavg", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(descriptor, 128).split()[4])
    except (OSError, ValueError, IndexError):
        return 0
    finally:
        os.close(descriptor)


def read_proc_stat(pid: int) -> tuple[bytes, int, int, int]:
    """State, parent, session and start time of a process."""
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        fields = os.read(descriptor, 1024).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)
    return fields[0], int(fields[1]), int(fields[3]), int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether it is stopped (SIGSTOP) or traced."""
    try:
        return read_proc_stat(pid)[0] in (b"T", b"t")
    except (OSError, ValueError, IndexError):
        return False
