"""A lock that allows one process per run folder: two that resume the same run would undo each other's steps."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from toolwise.errors import CheckpointError

LOCK = ".lock"
log = logging.getLogger("toolwise.training.checkpoint")

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class FolderLock:
    """Held from `acquire` to `release`, or until the process dies, when the kernel releases it.

    The file names the holder, but its existence does not mean that the lock is held.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / LOCK
        self._handle: int | None = None

    def acquire(self) -> Self:
        """Acquire the lock or raise at once: the holder may keep it for days."""
        while self._handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._lock(handle)
                if _is_same_file(handle, self.path):  # else the previous holder has just deleted the file
                    self._handle = handle
            finally:
                if self._handle is None:
                    os.close(handle)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        _held_locks.add(self)
        return self

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{self.path.parent} is in use by {_holder(handle)}: wait for it to end or stop it, or choose another "
                "--out"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning("%s cannot be locked (%s): do not start a second run in this folder", self.path, error.strerror)

    def release(self) -> None:
        if self._handle is None:
            return
        if _is_same_file(self._handle, self.path):
            self.path.unlink()  # while held: a process that has the old file open will try again
        self._close_handle()
        _held_locks.discard(self)

    def _close_handle(self) -> None:
        """Close without unlocking: after a fork the lock still belongs to the parent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    pid, _, host = os.pread(handle, 1000, 0).decode(errors="replace").strip().partition(" ")
    if not pid.isdigit():  # the holder has not written its id yet
        return "another process"
    return f"process {pid}" + (f" on {host}" if host not in ("", socket.gethostname()) else "")


_held_locks: set[FolderLock] = set()


def _drop_locks_after_fork() -> None:
    for lock in _held_locks:
        lock._close_handle()
    _held_locks.clear()


os.register_at_fork(after_in_child=_drop_locks_after_fork)
