"""A supervisor process: the parent of a process that may start others. When its child ends, it kills all descendants.

The kernel reparents orphans to the nearest subreaper. So whatever a descendant does (a new session, an empty
environment, a double fork, `CLONE_PARENT`), it stays below the supervisor, which kills what is left before it exits. It
exits with the status of its child.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from contextlib import suppress
from typing import Any, NoReturn

from toolwise.sandbox.layers.kernel import call_prctl, die_with_parent, list_pids, read_proc_stat

PROCESS_NAME = b"toolwise-watch"
"""The name of a supervisor in `ps`."""
SWEEP_S = 10.0
"""Give up after this time; the trainer takes over."""
PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 4, 15, 36
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGALRM)
KEEP_SUPERVISORS_SIGNAL = signal.SIGUSR1
"""Tells a supervisor that its child forks workers with their own supervisors, which may outlive that child."""
ANY_CHILD = 0x40000000
"""__WALL: all children, including those that send no SIGCHLD when they exit."""
KILL_WAIT_S = 0.02
MANY_PROCESSES = 32
"""With more descendants than this, which may fork faster than they are killed, raise our priority if permitted."""
PIDS_AHEAD = 4
"""Pids to check after the last one that ended: a process that keeps forking and exiting is always one pid ahead."""


def start_supervisor(start: dict[str, Any]) -> None:
    """Called first in a new process: put a supervisor above it if it is to be `supervised`."""
    if start["supervised"]:
        supervise(start["life"], start["report"])
        start["parent"] = os.getppid()


def supervise(liveness_fd: int, report: int | None = None) -> None:
    """Fork. Returns in the child, in a new session; this process stays behind as its supervisor.

    `liveness_fd` is the read end of a pipe whose write end the trainer holds: once that closes, everything is killed.
    On `report` the supervisor writes that the child has ended, and then how many other processes were still running.
    After `KEEP_SUPERVISORS_SIGNAL`, supervisors below this one survive the end of the child or SIGTERM, but not the end
    of the trainer.
    """
    try:
        call_prctl(PR_SET_CHILD_SUBREAPER, 1)
    except OSError:  # not a real Linux kernel: leftovers are found by session and environment, if at all
        if report is not None:
            os.close(report)
        return
    own_pid = os.getpid()
    # Block signals until the supervisor is ready for them: the child's code may run first.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD, KEEP_SUPERVISORS_SIGNAL, *IGNORED})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        die_with_parent(own_pid)
        if report is not None:
            os.close(report)
        return
    try:
        _Supervisor(child, liveness_fd, report).watch()
    finally:  # the child's code must never run here
        os.kill(own_pid, signal.SIGKILL)


class _Supervisor:
    def __init__(self, child: int, liveness_fd: int, report: int | None) -> None:
        self._child, self._report, self._keeps_supervisors = child, report, False
        self._status: int | None = None
        self._seen_pids: set[int] = set()
        self._last_reaped = child
        _close_fds_except({liveness_fd} if report is None else {liveness_fd, report})
        call_prctl(PR_SET_DUMPABLE, 0)  # other processes of this user must not read or change it
        _set_process_name()
        self._woken, wake = os.pipe()
        for descriptor in (self._woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, KEEP_SUPERVISORS_SIGNAL):
            signal.signal(number, _ignore_signal)
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._liveness_fd = liveness_fd

    def watch(self) -> NoReturn:
        """Wait until the child ends, the trainer is gone or SIGTERM arrives; then kill all descendants and exit."""
        self._poll.register(self._liveness_fd, 0)
        self._reap()
        while self._status is None:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            signals = self._signals()
            self._keeps_supervisors |= KEEP_SUPERVISORS_SIGNAL in signals
            if signal.SIGTERM in signals:
                break
            if self._liveness_fd in ready:
                self._keeps_supervisors = False
                break
            self._reap()
        self._poll.unregister(self._liveness_fd)
        self._write_report(b"ended ")
        self._sweep()
        self._write_report(b"%d" % len(self._seen_pids - {self._child}))
        _exit_like(self._status)

    def _write_report(self, data: bytes) -> None:
        if self._report is not None:
            with suppress(OSError):
                os.write(self._report, data)

    def _signals(self) -> bytes:
        with suppress(BlockingIOError):
            return os.read(self._woken, 4096)
        return b""

    def _reap(self) -> bool:
        """Reap ended children. False if there are no children left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | ANY_CHILD)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._last_reaped = pid
            if pid == self._child:
                self._status = status

    def _sweep(self) -> None:
        """Kill all descendants, pass by pass, until there are no children left."""
        until = time.monotonic() + SWEEP_S
        if self._status is None:
            _kill_with_group(self._child, self._child)
            self._wait(KILL_WAIT_S)  # most children started nothing, so there is nothing to search for
        elif self._reap():
            self._visit_descendants(kill=False)  # count them first: whole groups are killed at once
        while self._reap() and time.monotonic() < until:
            any_left = self._kill_next() or self._visit_descendants(kill=True)
            if not any_left and self._keeps_supervisors:
                return
            if len(self._seen_pids) > MANY_PROCESSES:
                with suppress(OSError):
                    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            self._wait(0.001)

    def _wait(self, seconds: float) -> None:
        self._poll.poll(seconds * 1000)
        self._signals()

    def _kill_next(self) -> bool:
        last = self._last_reaped
        return any(self._visit_process(pid, {os.getpid()}, kill=True) for pid in range(last + 1, last + 1 + PIDS_AHEAD))

    def _visit_descendants(self, *, kill: bool) -> bool:
        """Visit all descendants, in pid order: most parents have a lower pid than their children."""
        family = {os.getpid()}
        for pid in sorted(list_pids()):
            if self._visit_process(pid, family, kill=kill):
                family.add(pid)
        return len(family) > 1

    def _visit_process(self, pid: int, parents: set[int], *, kill: bool) -> bool:
        stat = read_proc_stat(pid)
        if stat.parent not in parents or (self._keeps_supervisors and pid != self._child and _is_supervisor(pid)):
            return False
        if not stat.ended:
            self._seen_pids.add(pid)
            if kill:
                _kill_with_group(pid, stat.group)
        return True


def _kill_with_group(pid: int, group: int) -> None:
    """Kill the group first, so that none of its members can fork meanwhile."""
    if group > 1 and group != os.getpgrp():
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _is_supervisor(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/comm", "rb") as file:
        return file.read().rstrip() == PROCESS_NAME
    return False


def _close_fds_except(keep: set[int]) -> None:
    """Close the descriptors shared with the child: a channel closes only when its last holder does."""
    try:
        opened = {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:
        opened = set(range(1024))
    for descriptor in opened - {0, 1, 2, *keep}:
        with suppress(OSError):  # the one used for listing
            os.close(descriptor)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    if devnull > 2:
        os.close(devnull)


def _set_process_name() -> None:
    import ctypes

    name = ctypes.create_string_buffer(PROCESS_NAME)
    with suppress(OSError):
        call_prctl(PR_SET_NAME, ctypes.addressof(name))


def _ignore_signal(*_: object) -> None:
    """The wakeup pipe carries the signal number."""


def _exit_like(status: int | None) -> NoReturn:
    """Exit with the child's status; as if killed if it did not end."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))
