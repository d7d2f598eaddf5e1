"""Folders for scratch folders, one per sandbox; those of killed trainers are removed when the next one starts."""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.kernel import closing_fd
from toolwise.sandbox.scratch import FOLDER_FLAGS, remove_folder, remove_root

PREFIX = "toolwise-sandbox-"
UNLOCKED_GRACE_S = 3600.0
STALE_ROOT_SWEEP_S = 2.0
LOCK = ".lock"
LOCK_ATTEMPTS = 20


class ScratchRoot:
    """The root of one sandbox, created with its first folder and locked while this process lives."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._lock_fd = -1
        self._numbers, self._pid = itertools.count(1), os.getpid()

    def new_folder(self) -> Path:
        """Not thread-safe as long as there is no root."""
        if self.path is None:
            self.path, self._lock_fd = make_root()
        folder = self.path / str(next(self._numbers))
        folder.mkdir(mode=0o700)
        return folder

    def close(self) -> None:
        """Remove all folders; in a forked child, where they belong to the parent, only close the lock."""
        lock_fd, self._lock_fd = self._lock_fd, -1
        if self.path is None or lock_fd < 0:
            return
        if self._pid == os.getpid():
            remove_root(self.path)
        os.close(lock_fd)


def make_root() -> tuple[Path, int]:
    """Create a root for scratch folders, locked while this process lives. Removes the roots of dead processes first."""
    sweep_roots()
    for _ in range(LOCK_ATTEMPTS):
        root = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        try:
            lock_fd = _lock(root)
        except BlockingIOError:  # another process is sweeping it right now
            continue
        if (root / LOCK).exists():
            return root, lock_fd
        os.close(lock_fd)  # it was swept between mkdtemp and the lock
    raise SandboxError(f"{tempfile.gettempdir()}: other processes remove scratch folders as soon as they are created")


def _lock(root: Path) -> int:
    with closing_fd(os.open(root, FOLDER_FLAGS)) as folder:
        if os.fstat(folder).st_uid != os.geteuid():
            raise PermissionError(f"{root} belongs to another user")
        lock_fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner is alive
        os.close(lock_fd)
        raise
    return lock_fd


def sweep_roots() -> None:
    """Remove the roots of killed trainers, within `STALE_ROOT_SWEEP_S`."""
    end = time.monotonic() + STALE_ROOT_SWEEP_S
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = root.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if not (root / LOCK).exists() and time.time() - status.st_mtime < UNLOCKED_GRACE_S:
                continue  # its owner may be about to lock it
            lock_fd = _lock(root)
            try:
                remove_folder(root, max(end - time.monotonic(), 0.01))
            finally:
                os.close(lock_fd)
