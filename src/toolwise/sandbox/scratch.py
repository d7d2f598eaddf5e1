"""Empties and removes folders that hostile code has filled, or still writes to.

Every step is relative to the descriptor of a folder and follows no link, so that nothing outside is touched, whatever
is exchanged for whatever in the meantime. Folders within folders are moved up before they are emptied: no depth needs
recursion, a long path or many descriptors. Nothing raises or takes longer than its time, and what is left is told.
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

EMPTY_S = 1.0
"""How long a folder may take to be emptied while somebody waits for it."""
REMOVE_S = 10.0
FOREGROUND_REMOVE_S = 0.02
"""How long whoever ends a worker waits for the end of its folder; the rest goes on beside."""
TICK_NS = 50_000_000
"""No clock that stamps changes has longer ticks."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_TAKEN_ERRNOS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_now = time.time_ns
_numbers = itertools.count(1)
# Kept here, since a worker that empties its own folder runs beside code that may patch them.
_scandir, _unlink, _rmdir, _rename, _open, _close = os.scandir, os.unlink, os.rmdir, os.rename, os.open, os.close
_fstat, _fchmod, _chmod, _geteuid, _monotonic = os.fstat, os.fchmod, os.chmod, os.geteuid, time.monotonic
log = logging.getLogger("toolwise.sandbox")


class EmptyFolderCache:
    """Tells in a microsecond that nothing was made in a folder since it was seen to be empty."""

    def __init__(self) -> None:
        self._empty_mtime_ns = -1
        """When the folder was last changed, as of the last time that it was empty; -1 where that says nothing."""

    def is_still_empty(self, found: os.stat_result) -> bool:
        return found.st_mtime_ns == self._empty_mtime_ns

    def record_empty(self, found: os.stat_result) -> None:
        """`found` was asked before the folder was seen empty. Changes within a tick of the clock look like one."""
        self._empty_mtime_ns = found.st_mtime_ns if _now() - found.st_mtime_ns > TICK_NS else -1


def empty_folder(folder: int, seconds: float = EMPTY_S) -> bool:
    """Removes all that is in the folder of a descriptor. False where something is left."""
    try:
        return _FolderEmptier(folder, seconds).run()
    except (OSError, MemoryError):  # the folder itself cannot be read: it is another's by now
        return False


def remove_folder(folder: Path, seconds: float = REMOVE_S) -> bool:
    """Removes a folder and all that is in it. False where something is left."""
    parent = -1
    try:
        parent = _open(folder.parent, _HANDLE & ~os.O_NOFOLLOW)
        with suppress(NotADirectoryError, OSError):
            descriptor = _open(folder.name, FOLDER_FLAGS, dir_fd=parent)
            try:
                empty_folder(descriptor, seconds)
            finally:
                _close(descriptor)
        return _remove_name(parent, folder.name) or not _is_there(parent, folder.name)
    except OSError:
        return not os.path.lexists(folder)
    finally:
        if parent >= 0:
            _close(parent)


def remove_in_background(folder: Path) -> None:
    """The same without waiting for a folder that takes long: the rest is removed in a thread."""
    if remove_folder(folder, FOREGROUND_REMOVE_S):
        return
    with suppress(RuntimeError):  # the interpreter ends: whoever made the folder's root removes it then
        threading.Thread(target=remove_folder, args=(folder,), name="toolwise-sandbox-sweep").start()


def remove_root(root: Path, seconds: float = REMOVE_S) -> None:
    """Removes a folder for the last time: what is left then is told to whoever reads the log."""
    if not remove_folder(root, seconds):
        log.warning("%s: not all of it could be removed in %g s; remove it by hand", root, seconds)


class _FolderEmptier:
    def __init__(self, top: int, seconds: float) -> None:
        self._top, self._until = top, _monotonic() + seconds
        found = _fstat(top)
        self._device = found.st_dev
        self._changed = 0
        """Entries removed or moved up in this pass."""
        _let_in(top, found)

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
        """Removes what is a file, a link or an empty folder now."""
        gone = _remove_name(folder, entry.name, _looks_like_folder(entry))
        self._changed += gone
        return gone

    def _empty_subfolder(self, name: str) -> None:
        """Empties a folder that lies at the top: the folders in it come to lie beside it."""
        folder = open_subfolder(self._top, name, self._device)
        if folder is None:
            return
        try:
            with _scandir(folder) as entries:
                for entry in entries:
                    if _monotonic() > self._until:
                        return
                    if not self._remove(folder, entry):
                        self._move_up(folder, entry.name)
        except OSError:
            return
        finally:
            _close(folder)
        self._changed += _remove_name(self._top, name, True)

    def _move_up(self, folder: int, name: str) -> None:
        for attempt in range(3):
            try:
                _rename(name, f".removed-{next(_numbers)}", src_dir_fd=folder, dst_dir_fd=self._top)
            except PermissionError:
                below = None if attempt else open_subfolder(folder, name, self._device)  # which makes it ours to move
                if below is None:
                    return
                _close(below)
            except OSError as fault:
                if fault.errno not in _NAME_TAKEN_ERRNOS:
                    return
            else:
                self._changed += 1
                return


def open_subfolder(folder: int, name: str, device: int) -> int | None:
    """The descriptor of a folder in `folder`, made readable where it is ours; None where there is none, or where
    something else than `device` is mounted."""
    try:
        try:
            descriptor = _open(name, FOLDER_FLAGS, dir_fd=folder)
        except PermissionError:
            descriptor = _open_closed(folder, name, device)
        found = _fstat(descriptor)
        if found.st_dev != device:
            _close(descriptor)
            return None
        _let_in(descriptor, found)
        return descriptor
    except OSError:
        return None


def _open_closed(folder: int, name: str, device: int) -> int:
    """A folder that its owner may not read."""
    handle = _open(name, _HANDLE, dir_fd=folder)
    try:
        found = _fstat(handle)
        if stat.S_ISDIR(found.st_mode) and found.st_dev == device and found.st_uid == _geteuid():
            _chmod(f"/proc/self/fd/{handle}", 0o700)  # this very folder, whatever has its name now
        return _open(".", FOLDER_FLAGS, dir_fd=handle)
    finally:
        _close(handle)


def _let_in(folder: int, found: os.stat_result) -> None:
    """Gives the owner of a folder all rights to it."""
    if found.st_mode & 0o700 != 0o700 and found.st_uid == _geteuid():
        with suppress(OSError):
            _fchmod(folder, 0o700)


def _looks_like_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _remove_name(folder: int, name: str, is_folder: bool = True) -> bool:
    """Removes a file or an empty folder, as which it may have been exchanged for the other since it was looked at."""
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


def _is_there(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True
