"""What Python does not wrap: kernel calls through ctypes, which a worker applies to itself, descriptors, and what /proc
reports about processes.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import functools
import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS = 1, 38, 39
CAPABILITY_VERSION_3 = 0x20080522
_close = os.close  # bound here: a worker shares its process with code that may patch it


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def raise_errno(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


def call_prctl(option: int, argument: int) -> None:
    if libc().prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        raise_errno(f"prctl({option})")


@contextmanager
def closing_fd(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        _close(descriptor)


def wait_ready(descriptor: int, timeout_s: float | None, event: int = select.POLLIN) -> bool:
    """Whether it is ready within `timeout_s` (None: wait until it is). `event` 0: only when its other end is closed."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def die_with_parent(parent_pid: int) -> None:
    """Request SIGKILL when the thread that started us ends."""
    call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        os._exit(1)


def die_with_trainer(liveness_fd: int, parent: int) -> None:
    """Have the kernel kill this process when the trainer dies, even while C code holds the GIL.

    `liveness_fd` is the read end of a pipe whose write end the trainer holds; `parent` is the pid of the process that
    started this one.
    """
    if sys.platform != "linux":
        return
    die_with_parent(parent)
    kill_when_closed(liveness_fd, os.getpid())


def kill_when_closed(liveness_fd: int, target: int) -> None:
    """Have the kernel kill `target`, a pid or (negative) a process group, when the last writer closes the pipe.

    A pipe without data signals its reader once: then.
    """
    fcntl.fcntl(liveness_fd, fcntl.F_SETOWN, target)
    fcntl.fcntl(liveness_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(liveness_fd, fcntl.F_SETFL, fcntl.fcntl(liveness_fd, fcntl.F_GETFL) | os.O_ASYNC)


def send_descriptors(channel: int, payload: bytes, descriptors: Iterable[int]) -> None:
    """Send `payload` with descriptors through the socket `channel`, which stays open."""
    import _socket  # not `socket`, whose import would slow down every program

    sock = _socket.socket(fileno=channel)
    try:
        sock.sendmsg([payload], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", descriptors))])
    finally:
        sock.detach()


def set_no_new_privs() -> None:
    call_prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Drop all capabilities: root keeps only what it may do as the owner of its files."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc().capset(ctypes.byref(header), ctypes.byref(nothing)) != 0 and ctypes.get_errno() != errno.ENOSYS:
        raise_errno("capset")


def capabilities() -> int:
    """The capabilities in effect, as bits."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc().capget(ctypes.byref(header), ctypes.byref(sets)) != 0:
        raise_errno("capget")
    return int(sets[0]) | int(sets[3]) << 32


def has_no_new_privs() -> bool:
    return int(libc().prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)) == 1


class ProcStat(NamedTuple):
    """Part of /proc/PID/stat."""

    state: bytes
    parent: int
    group: int
    session: int
    start_ticks: int
    """Start time in kernel clock ticks."""

    @property
    def ended(self) -> bool:
        return self.state in (b"Z", b"X")


GONE = ProcStat(b"X", 0, 0, 0, 0)
"""Of a process that does not exist."""


def list_pids(folder: str = "/proc") -> list[int]:
    return [int(name) for name in os.listdir(folder) if name.isdigit()]


def read_proc_stat(pid: int) -> ProcStat:
    try:
        fields = stat_fields(f"/proc/{pid}/stat")
        return ProcStat(fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return GONE


def is_stopped(pid: int) -> bool:
    """Whether it is stopped (SIGSTOP) or traced."""
    return read_proc_stat(pid).state in (b"T", b"t")


def stat_fields(path: str | bytes) -> list[bytes]:
    """The fields of a `stat` file from the state on; the process name before it may contain any character."""
    return read_small_file(path).rpartition(b")")[2].split()


def read_small_file(path: str | bytes) -> bytes:
    """Faster than `Path.read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
