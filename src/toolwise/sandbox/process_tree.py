"""A started process and everything below it: found, counted and ended, even if it tries to survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from toolwise.sandbox.layers.bubblewrap import BWRAP_TIMEOUT_S
from toolwise.sandbox.layers.kernel import closing_fd, list_pids, read_proc_stat, read_small_file, wait_ready

MARK_VARIABLE = "TOOLWISE_SANDBOX"
"""Marks descendants for `sweep_leftovers`: even a daemon inherits the environment."""
SUPERVISOR_END_S = 15.0
"""How long a supervisor may take to kill its descendants."""
INIT_EXIT_WAIT_S = 5.0
SUPERVISION_AVAILABLE = sys.platform == "linux"
_SWEEPS = 40


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


class ProcessTree:
    """A process that leads its own session; what it started is found by session and environment."""

    leftover_count: int | None = 0
    """Number of processes still running when the program ended; None if unknown."""

    def __init__(self, popen: subprocess.Popen[bytes], mark: str, report: ReportPipe | None = None) -> None:
        """`report`: the pipe of the supervisor that the program puts above itself."""
        self._popen, self.mark, self._report = popen, mark, report

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def poll(self) -> int | None:
        self._popen.poll()
        return self.returncode

    def own_pids(self) -> list[int]:
        """The processes that the program needs to start up."""
        return [self.pid]

    def proc_folders(self) -> Iterator[str]:
        """The /proc folder of each of its processes."""
        yield f"/proc/{self.pid}"
        yield from self._members()

    def _members(self) -> Iterator[str]:
        return (f"/proc/{pid}" for pid in members_of(self.pid, read_proc_stat(self.pid).start_ticks))

    def count_others(self, worker: int, new_pids: Iterable[int] | None) -> int:
        """Number of running processes besides the worker, among `new_pids` if the kernel lists them."""
        return 0

    def kill(self) -> None:
        """Kill it without waiting; `end` cleans up."""
        if self._popen.returncode is None:  # until wait() its pid cannot be reused
            for send in (os.killpg, os.kill):
                with suppress(OSError):
                    send(self.pid, signal.SIGKILL)

    def end(self, *, sweep: bool) -> int:
        """Kill it and everything it started, and wait until they are gone. Returns the exit code."""
        self.kill()
        if sweep:  # before wait(): until then its pid, and so its session id, cannot be reused
            sweep_leftovers(self.pid, self.mark)
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        return self._popen.wait(timeout)

    def close_fds(self) -> None:
        if self._report is not None:
            self._report.close()


class SupervisedTree(ProcessTree):
    """A supervisor (`layers/supervisor.py`) and its program: it ends after the program, with the same status."""

    def proc_folders(self) -> Iterator[str]:
        return self._members()

    def count_others(self, worker: int, new_pids: Iterable[int] | None) -> int:
        return sum(pid != worker and _is_process(pid) for pid in members_of(self.pid, among=new_pids))

    def kill(self) -> None:
        if self._popen.returncode is None:
            ask_supervisor_to_end(self.pid)

    def end(self, *, sweep: bool) -> int:
        assert self._report is not None
        self.kill()
        if not wait_ready(self._report.ours, SUPERVISOR_END_S, 0):  # something keeps it from finishing
            for pid in members_of(self.pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._popen.kill()
        code = self._popen.wait()
        self.leftover_count = self._report.read_count()
        if self.leftover_count is None:  # the supervisor itself was killed, so its orphans are no longer below it
            sweep_leftovers(self.pid, self.mark)
        return code


class NamespacedTree(ProcessTree):
    """A bwrap process: when the first process inside dies, the kernel kills all others."""

    def __init__(self, popen: subprocess.Popen[bytes], mark: str, report: ReportPipe | None, info: int) -> None:
        super().__init__(popen, mark, report)
        self.init = _read_child(info)
        self._handle = self._open_init()
        self._first: int | None = None

    def _open_init(self) -> int | None:
        if self.init is None:
            return None
        try:
            handle = os.pidfd_open(self.init)
        except OSError:
            return None
        if read_proc_stat(self.init).parent == self.pid:
            return handle
        os.close(handle)  # it is gone and its pid was reused
        return None

    @property
    def returncode(self) -> int | None:
        """As in `Popen`; bwrap exits with 128 + n if signal n killed the program."""
        code = self._popen.returncode
        return 128 - code if code is not None and code - 128 in set(signal.Signals) else code

    def own_pids(self) -> list[int]:
        return [self.pid, self.init or 0]

    def first(self) -> int:
        """Pid, outside, of the program started inside: the oldest child of the first process. 0 if unknown."""
        if self._first is None:
            stats = {pid: read_proc_stat(pid) for pid in list_pids()}
            started = {pid: stat.start_ticks for pid, stat in stats.items() if stat.parent == self.init}
            self._first = min(started, key=started.__getitem__) if started else None
        return self._first or 0

    def proc_folders(self) -> Iterator[str]:
        """From the /proc of their namespace, which lists no others."""
        inside = f"/proc/{self.init}/root/proc"
        with suppress(OSError):
            yield from [f"{inside}/{pid}" for pid in list_pids(inside)]

    def count_others(self, worker: int, new_pids: Iterable[int] | None) -> int:
        return max(0, len(list(self.proc_folders())) - 2)  # bwrap's init and the worker

    def kill(self) -> None:
        """Kill everything inside at once; then bwrap ends too."""
        if self._handle is None:
            super().kill()
            return
        with suppress(OSError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def end(self, *, sweep: bool) -> int:
        super().kill()  # bwrap, whatever it is doing
        return super().end(sweep=False)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until bwrap and everything inside have ended."""
        self._popen.wait(timeout)
        self.kill()
        if self._handle is not None:
            wait_ready(self._handle, INIT_EXIT_WAIT_S)
        if self._report is not None:
            self.leftover_count = self._report.read_count()
        self.close_fds()
        code = self.returncode
        assert code is not None
        return code

    def close_fds(self) -> None:
        super().close_fds()
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _read_child(info: int) -> int | None:
    data, deadline = b"", time.monotonic() + BWRAP_TIMEOUT_S
    while b"}" not in data and time.monotonic() < deadline:
        if not wait_ready(info, 0.1):
            continue
        chunk = os.read(info, 4096)
        if not chunk:
            break
        data += chunk
    try:
        return int(json.loads(data)["child-pid"])
    except (ValueError, KeyError, TypeError):
        return None


def ask_supervisor_to_end(pid: int) -> None:
    for number in (signal.SIGCONT, signal.SIGTERM):
        with suppress(OSError):
            os.kill(pid, number)


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


def _is_process(pid: int) -> bool:
    """Whether `pid` is a process; /proc also resolves thread ids."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_bytes().split(b"\nTgid:")[1].split(None, 1)[0]) == pid
    return False


def last_pid() -> int:
    """The most recent pid or thread id on this machine; 0 if the kernel does not report it."""
    with suppress(OSError, ValueError, IndexError):
        return int(read_small_file("/proc/loadavg").split()[4])
    return 0


def sweep_leftovers(session: int, mark: str) -> None:
    """Kill whatever still runs in a session or carries its mark, an inherited environment variable.

    Used where no supervisor keeps track of the processes.
    """
    if sys.platform != "linux":
        return
    for _ in range(_SWEEPS):
        others = [pid for pid in sorted(list_pids(), reverse=True) if pid != os.getpid()]
        pids = [pid for pid in others if _belongs(pid, session, mark)]
        for pid in pids:
            # Checked again through a pidfd: the pid may have been reused.
            with suppress(OSError), closing_fd(os.pidfd_open(pid)) as handle:
                if _belongs(pid, session, mark):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.005)


def _belongs(pid: int, session: int, mark: str) -> bool:
    stat = read_proc_stat(pid)
    if stat.ended or stat.session == session:
        return not stat.ended
    with suppress(OSError):
        return f"{MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False
