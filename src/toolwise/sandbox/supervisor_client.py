"""The trainer's end of a supervisor (`layers/supervisor.py`), and who is beneath one."""

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
"""How long a supervisor may take to end what is beneath it."""
SUPERVISION_AVAILABLE = sys.platform == "linux"


class ReportPipe:
    """A pipe on which a supervisor says how many processes its child had left running."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()

    def close_child_end(self) -> None:
        """Once the supervisor has its end."""
        os.close(self.theirs)

    def wait(self, timeout_s: float) -> bool:
        """Until the supervisor is gone; False where it is not."""
        poll = select.poll()
        poll.register(self.ours, 0)  # which is ready when the last who could write has gone
        return bool(poll.poll(timeout_s * 1000))

    def read_count(self) -> int | None:
        """None where it was killed before it could say. Once it is gone, and only once."""
        os.set_blocking(self.ours, False)
        said = b""
        with suppress(BlockingIOError):
            said = os.read(self.ours, 64)
        self.close()
        count = said.partition(b" ")[2]
        return int(count) if count.isdigit() else None

    def close(self) -> None:
        read, self.ours = self.ours, -1
        if read >= 0:
            os.close(read)


class SupervisedProcess:
    """A supervisor, spoken to like the `Popen` of the program beneath it: it ends as that ends, and after it."""

    def __init__(self, popen: subprocess.Popen[bytes], report: ReportPipe) -> None:
        self._popen, self._report = popen, report
        self.leftover_count: int | None = None
        """How many processes still ran when it ended; None where nobody knows."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def poll(self) -> int | None:
        return self._popen.poll()

    def ask_to_end(self) -> None:
        if self._popen.returncode is None:  # until it is waited for its number is its own
            for number in (signal.SIGCONT, signal.SIGTERM):
                with suppress(OSError):
                    os.kill(self.pid, number)

    def end(self) -> int:
        """Ends everything beneath it, and waits until it is gone. Returns how the program ended."""
        self.ask_to_end()
        if not self._report.wait(SUPERVISOR_END_S):  # somebody keeps it from its work
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
    """The living processes beneath one, as they are found, so that who has seen enough of a bomb need not look through
    all of it. `since`: none is older, in the kernel's ticks. `among`: the numbers to look at, all by default."""
    beneath = {ancestor: True, 0: False, 1: False, os.getpid(): False}

    def belongs(pid: int) -> bool:
        chain = []
        while pid not in beneath:
            chain.append(pid)
            try:
                _, pid, _, birth = read_proc_stat(pid)
            except (OSError, ValueError, IndexError):
                pid = 0
                break
            if birth < since:
                pid = 0
        beneath.update(dict.fromkeys(chain, beneath[pid]))
        return beneath[pid]

    if among is None:
        among = sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)
    for pid in among:
        if pid != ancestor and belongs(pid):
            with suppress(OSError, ValueError, IndexError):
                if read_proc_stat(pid)[0] not in (b"Z", b"X"):
                    yield pid


def last_pid() -> int:
    """The number that the kernel gave to the last process or thread; 0 where it does not say."""
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
    """The state of a process, its parent, its session and its birth."""
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        words = os.read(descriptor, 1024).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)
    return words[0], int(words[1]), int(words[3]), int(words[19])


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped it (SIGSTOP), or traces it."""
    try:
        return read_proc_stat(pid)[0] in (b"T", b"t")
    except (OSError, ValueError, IndexError):
        return False
