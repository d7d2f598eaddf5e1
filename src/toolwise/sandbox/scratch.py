"""Empties and removes folders that hostile code has filled or still writes to.

Every step is relative to a folder descriptor and follows no links, so nothing outside is touched even if entries are
swapped meanwhile. Nested folders are moved up before they are emptied, so that no depth needs recursion, long paths or
many descriptors. Nothing raises or exceeds its time limit; callers learn whether something is left.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

from toolwise.sandbox.layers.kernel import closing_fd

EMPTY_S = 1.0
"""How long emptying a folder may take while a caller waits."""
REMOVE_S = 10.0
FOREGROUND_REMOVE_S = 0.02
"""How long ending a worker waits for its folder; the rest is removed in the background."""
TICK_NS = 50_000_000
"""Upper bound on the resolution of file timestamps."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_TAKEN_ERRNOS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_now = time.time_ns
_numbers = itertools.count(1)
# Saved here: a worker that empties its own folder shares a process with code that may patch them.
_scandir, _unlink, _rmdir, _rename, _open, _close = os.scandir, os.unlink, os.rmdir, os.rename, os.open, os.close
_stat, _listdir, _fstat, _fchmod, _chmod, _geteuid, _monotonic = (
    os.stat,
    os.listdir,
    os.fstat,
    os.fchmod,
    os.chmod,
    os.geteuid,
    time.monotonic,
)
log = logging.getLogger("toolwise.sandbox")


class EmptyFolderCache:
    """Checks in a microsecond that nothing was created in a folder since it was last seen empty."""

    def __init__(self) -> None:
        self._empty_mtime_ns = -1
        """The folder's mtime when it was last seen empty; -1 if that proves nothing."""

    def is_empty(self, folder: int | str) -> bool:
        """Always pass the same folder, by descriptor or path."""
        mtime_ns = _stat(folder).st_mtime_ns
        if mtime_ns == self._empty_mtime_ns:
            return True
        if _listdir(folder):
            return False
        # Changes within one clock tick share an mtime.
        self._empty_mtime_ns = mtime_ns if _now() - mtime_ns > TICK_NS else -1
        return True


def empty_folder(folder: int, seconds: float = EMPTY_S) -> bool:
    """Remove everything in a folder, given by descriptor. Returns False if something is left."""
    try:
        return _FolderEmptier(folder, seconds).run()
    except (OSError, MemoryError):  # the folder itself cannot be read: it belongs to someone else by now
        return False


def remove_folder(folder: Path, seconds: float = REMOVE_S) -> bool:
    """Remove a folder and everything in it. Returns False if something is left."""
    with suppress(OSError), closing_fd(_open(folder.parent, _HANDLE & ~os.O_NOFOLLOW)) as parent:
        with suppress(OSError), closing_fd(_open(folder.name, FOLDER_FLAGS, dir_fd=parent)) as descriptor:
            empty_folder(descriptor, seconds)
        if _remove_name(parent, folder.name):
            return True
    return not os.path.lexists(folder)


def remove_in_background(folder: Path, foreground_s: float | None = None) -> None:
    """Like `remove_folder`, but what takes longer than `foreground_s` is removed in a thread."""
    if remove_folder(folder, FOREGROUND_REMOVE_S if foreground_s is None else foreground_s):
        return
    with suppress(RuntimeError):  # the interpreter is exiting: the owner of the root removes it
        threading.Thread(target=remove_folder, args=(folder,), name="toolwise-sandbox-sweep").start()


def remove_root(root: Path, seconds: float = REMOVE_S) -> None:
    """Remove a folder for good; log a warning if something is left."""
    if not remove_folder(root, seconds):
        log.warning("%s could not be removed completely within %g s; remove it by hand", root, seconds)


class _FolderEmptier:
    def __init__(self, top: int, seconds: float) -> None:
        self._top, self._until = top, _monotonic() + seconds
        status = _fstat(top)
        self._device = status.st_dev
        self._changed = 0
        """Entries removed or moved up in this pass."""
        _grant_owner_access(top, status)

    def run(self) -> bool:
        while True:
            self._changed = seen = 0
            with _scandir(self._top) as entries:
                for entry in entries:
                    seen += 1
                    if _monotonic() > self._until:
                        return False
                    if not self._remove(self._top, entry):
                        self._empty_subfolder(entry.name)
            if not seen or not self._changed:
                return not seen

    def _remove(self, folder: int, entry: os.DirEntry[str]) -> bool:
        """Remove an entry that is a file, a link or an empty folder."""
        removed = _remove_name(folder, entry.name, _looks_like_folder(entry))
        self._changed += removed
        return removed

    def _empty_subfolder(self, name: str) -> None:
        """Empty a top-level folder; its subfolders are moved up beside it."""
        folder = open_subfolder(self._top, name, self._device)
        if folder is None:
            return
        try:
            with closing_fd(folder), _scandir(folder) as entries:
                for entry in entries:
                    if _monotonic() > self._until:
                        return
                    if not self._remove(folder, entry):
                        self._move_up(folder, entry.name)
        except OSError:
            return
        self._changed += _remove_name(self._top, name, True)

    def _move_up(self, folder: int, name: str) -> None:
        for attempt in range(3):
            try:
                _rename(name, f".removed-{next(_numbers)}", src_dir_fd=folder, dst_dir_fd=self._top)
            except PermissionError:
                subfolder = None if attempt else open_subfolder(folder, name, self._device)  # which makes it movable
                if subfolder is None:
                    return
                _close(subfolder)
            except OSError as fault:
                if fault.errno not in _NAME_TAKEN_ERRNOS:
                    return
            else:
                self._changed += 1
                return


def open_subfolder(folder: int, name: str, device: int) -> int | None:
    """Open a subfolder and make it readable if we own it. None if it does not exist or is on another device."""
    try:
        try:
            descriptor = _open(name, FOLDER_FLAGS, dir_fd=folder)
        except PermissionError:
            descriptor = _open_closed(folder, name, device)
        status = _fstat(descriptor)
        if status.st_dev != device:
            _close(descriptor)
            return None
        _grant_owner_access(descriptor, status)
        return descriptor
    except OSError:
        return None


def _open_closed(folder: int, name: str, device: int) -> int:
    """Open a folder whose mode forbids reading to its owner."""
    with closing_fd(_open(name, _HANDLE, dir_fd=folder)) as handle:
        status = _fstat(handle)
        if stat.S_ISDIR(status.st_mode) and status.st_dev == device and status.st_uid == _geteuid():
            _chmod(f"/proc/self/fd/{handle}", 0o700)  # this very folder, even if its name now refers to another
        return _open(".", FOLDER_FLAGS, dir_fd=handle)


def _grant_owner_access(folder: int, status: os.stat_result) -> None:
    if status.st_mode & 0o700 != 0o700 and status.st_uid == _geteuid():
        with suppress(OSError):
            _fchmod(folder, 0o700)


def _looks_like_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _remove_name(folder: int, name: str, is_folder: bool = True) -> bool:
    """Remove a file or an empty folder. Tries both, as one may have been swapped for the other meanwhile."""
    for remove in (_rmdir, _unlink) if is_folder else (_unlink, _rmdir):
        try:
            remove(name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except OSError as fault:
            if fault.errno not in (errno.ENOTDIR, errno.EISDIR, errno.EPERM):
                return False
        else:
            return True
    return False
