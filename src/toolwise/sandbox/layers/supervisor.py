"""The parent of a process that may start others: when that process ends, everything that it started ends with it.

The kernel hands orphans to the nearest subreaper. So whatever a descendant does (a new session, an empty environment,
a double fork, `CLONE_PARENT`), it stays beneath the supervisor, which kills what is left before it ends itself. It
ends as its child ended, so that whoever waits for it learns how.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from contextlib import suppress
from typing import Any, NoReturn

from toolwise.sandbox.layers.kernel import call_prctl, die_with_parent

PROCESS_NAME = b"toolwise-watch"
"""What `ps` calls a supervisor."""
SWEEP_S = 10.0
"""After so long without an end the trainer takes over."""
PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 4, 15, 36
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGALRM)
KEEP_SUPERVISORS_SIGNAL = signal.SIGUSR1
"""Tells a supervisor that its child forks workers with supervisors of their own, which may outlive that child."""
ANY_CHILD = 0x40000000
"""__WALL: children of every kind, also those that signal nothing when they end."""
DYING_S = 0.02
CROWD = 32
"""Of a crowd that may fork faster than it is killed, the supervisor goes first where it is allowed to."""
PIDS_AHEAD = 4
"""Process numbers looked at after one that ended: a process that forks and exits for ever is always a number ahead."""


def start_supervisor(start: dict[str, Any]) -> None:
    """First thing in a process of the sandbox's: puts a supervisor above it where there is a `report` for it."""
    if start["report"] is not None:
        supervise(start["life"], start["report"])
        start["parent"] = os.getppid()


def supervise(lifeline_fd: int, report: int | None = None) -> None:
    """Returns in a new child, in a session of its own. This process stays behind as its supervisor.

    `lifeline_fd` is the reading end of a pipe whose other end the trainer holds: once that is closed, all ends. On
    `report` it
    says that the child has ended, and then how many processes it found running beside it. After
    `KEEP_SUPERVISORS_SIGNAL`, supervisors
    beneath this one are left alone where the child ends or SIGTERM asks for the end, and not where the trainer is gone.
    """
    try:
        call_prctl(PR_SET_CHILD_SUBREAPER, 1)
    except OSError:  # no kernel of Linux's own: what is left is found by session and environment, if at all
        if report is not None:
            os.close(report)
        return
    own = os.getpid()
    # Until it is ready for them, signals wait: the child's code may run before.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD, KEEP_SUPERVISORS_SIGNAL, *IGNORED})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        die_with_parent(own)
        if report is not None:
            os.close(report)
        return
    try:
        _Supervisor(child, lifeline_fd, report).watch()
    finally:  # nothing of the child's code may ever run here
        os.kill(own, signal.SIGKILL)


class _Supervisor:
    def __init__(self, child: int, lifeline_fd: int, report: int | None) -> None:
        self._child, self._report, self._keeps_supervisors = child, report, False
        self._status: int | None = None
        self._seen_pids: set[int] = set()
        self._last_reaped = child
        _close_fds_except({lifeline_fd} if report is None else {lifeline_fd, report})
        call_prctl(PR_SET_DUMPABLE, 0)  # whoever has the same user must not read or change it
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
        self._lifeline_fd = lifeline_fd

    def watch(self) -> NoReturn:
        """Until the child has ended, the trainer is gone, or SIGTERM asks for the end."""
        self._poll.register(self._lifeline_fd, 0)
        self._reap()
        while self._status is None:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            signals = self._signals()
            self._keeps_supervisors |= KEEP_SUPERVISORS_SIGNAL in signals
            if signal.SIGTERM in signals:
                break
            if self._lifeline_fd in ready:
                self._keeps_supervisors = False
                break
            self._reap()
        self._poll.unregister(self._lifeline_fd)
        self._write_report(b"ended ")
        self._sweep()
        self._write_report(b"%d" % len(self._seen_pids - {self._child}))
        _exit_like(self._status)

    def _write_report(self, words: bytes) -> None:
        if self._report is not None:
            with suppress(OSError):
                os.write(self._report, words)

    def _signals(self) -> bytes:
        with suppress(BlockingIOError):
            return os.read(self._woken, 4096)
        return b""

    def _reap(self) -> bool:
        """Buries the dead. False where nobody is left."""
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
        """Kills what is beneath this process, pass by pass, until the kernel knows of no child any more."""
        until = time.monotonic() + SWEEP_S
        if self._status is None:
            _kill_with_group(self._child, self._child)
            self._wait(DYING_S)  # most have started nothing, and nobody need be looked for
        elif self._reap():
            self._visit_descendants(kill=False)  # to count them: whole groups are killed at once
        while self._reap() and time.monotonic() < until:
            found = self._kill_next() or self._visit_descendants(kill=True)
            if not found and self._keeps_supervisors:
                return
            if len(self._seen_pids) > CROWD:
                _raise_priority()
            self._wait(0.001)

    def _wait(self, seconds: float) -> None:
        """For the end of a child."""
        self._poll.poll(seconds * 1000)
        self._signals()

    def _kill_next(self) -> bool:
        last = self._last_reaped
        return any(self._visit_process(pid, {os.getpid()}, kill=True) for pid in range(last + 1, last + 1 + PIDS_AHEAD))

    def _visit_descendants(self, *, kill: bool) -> bool:
        """All beneath this process. Small numbers first: of most processes the parent comes before them."""
        beneath = {os.getpid()}
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            if self._visit_process(pid, beneath, kill=kill):
                beneath.add(pid)
        return len(beneath) > 1

    def _visit_process(self, pid: int, parents: set[int], *, kill: bool) -> bool:
        try:
            state, parent, group = _stat(pid)
        except (OSError, ValueError, IndexError):
            return False
        if parent not in parents or (self._keeps_supervisors and pid != self._child and _is_supervisor(pid)):
            return False
        if state not in (b"Z", b"X"):
            self._seen_pids.add(pid)
            if kill:
                _kill_with_group(pid, group)
        return True


def _kill_with_group(pid: int, group: int) -> None:
    """The group first: none of it can fork meanwhile."""
    if group > 1 and group != os.getpgrp():
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _raise_priority() -> None:
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _stat(pid: int) -> tuple[bytes, int, int]:
    """The state of a process, its parent and its group."""
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        words = os.read(descriptor, 1024).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)
    return words[0], int(words[1]), int(words[2])


def _is_supervisor(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/comm", "rb") as file:
        return file.read().rstrip() == PROCESS_NAME
    return False


def _close_fds_except(kept: set[int]) -> None:
    """Of what it shares with its child: a channel is closed only when the last who has it is gone."""
    try:
        opened = {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:
        opened = set(range(1024))
    for descriptor in opened - {0, 1, 2, *kept}:
        with suppress(OSError):  # the one that the list was read from
            os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)


def _set_process_name() -> None:
    import ctypes

    name = ctypes.create_string_buffer(PROCESS_NAME)
    with suppress(OSError):
        call_prctl(PR_SET_NAME, ctypes.addressof(name))


def _ignore_signal(*_: object) -> None:
    """The number of the signal is in the pipe."""


def _exit_like(status: int | None) -> NoReturn:
    """Ends as the child did; as if killed where it did not end."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))
