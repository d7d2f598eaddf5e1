"""Copies of a rollout's files: into the file system that one call works in, and back when nothing of the call lives.

Only what has changed is copied, so that calls at the same time keep each other's files. What a program leaves is a
stranger's: no link is followed, and depth, number and size have limits.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from toolwise.sandbox.disk_usage import MAX_FOLDER_DEPTH
from toolwise.sandbox.layers.disk import MAX_FILES
from toolwise.sandbox.scratch import empty_folder, open_subfolder

CLOCK_REALTIME_COARSE = 5
"""The clock that changes are stamped with."""
MAX_PATH_CHARS = 4 << 20
"""Characters in all paths together: long names at a great depth would keep the trainer busy for seconds."""
MAX_LINKED_PATH_CHARS = 1000
"""Of paths that are linked; the files behind longer ones are copied again."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FolderState = dict[str, tuple[int, int]]
"""Path -> inode and time of change, of all that is in a folder; whatever holds others comes before them."""


class CopyLimitError(Exception):
    """There is more than may be copied."""


def folder_state(folder: int) -> FolderState:
    """What there is in a folder, so that a change can be told later."""
    state: FolderState = {}
    length = 0
    device = os.fstat(folder).st_dev
    levels: list[tuple[int, str, list[str]]] = [(os.dup(folder), "", os.listdir(folder))]
    try:
        while levels:
            at, path, names = levels[-1]
            if not names:
                os.close(levels.pop()[0])
                continue
            name = names.pop()
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
            state[path + name] = (found.st_ino, found.st_ctime_ns)
            length += len(path) + len(name)
            below = open_subfolder(at, name, device) if stat.S_ISDIR(found.st_mode) else None
            if below is not None:
                levels.append((below, f"{path}{name}/", os.listdir(below)))
            if len(state) > MAX_FILES or len(levels) > MAX_FOLDER_DEPTH:
                raise CopyLimitError(f"more than {MAX_FILES:,} files, or than {MAX_FOLDER_DEPTH} folders in each other")
            if length > MAX_PATH_CHARS:
                raise CopyLimitError("names that are too long, too deep in folders")
        return state
    finally:
        for at, _, _ in levels:
            os.close(at)


def wait_for_clock_tick() -> None:
    """Until the kernel gives another time to what changes: a few milliseconds."""
    now = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == now:
        time.sleep(0.0005)


def copy_changes(source: int, target: int, before: FolderState, max_bytes: int) -> bool:
    """Does in `target` what was done in `source` since it was like `before`. Whether there was anything to do."""
    after = folder_state(source)
    if after == before:
        return False
    with _Copy(source, target, max_bytes) as copy:
        copy.remove(path for path in before if path not in after)
        for path, found in after.items():
            if before.get(path) != found:
                copy.copy(path)
    return True


@dataclass(slots=True)
class _Copy:
    source: int
    target: int
    bytes_left: int
    _parent: str = ""
    _open: tuple[int, int] | None = None
    """The parent of the last path, in both places."""
    _links: dict[int, str] = field(default_factory=dict)
    """Inode -> where the first of its names was copied to."""
    _modes: list[tuple[str, int]] = field(default_factory=list)
    """Of folders: set last, since one that is closed to its owner cannot be filled."""

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *_: object) -> None:
        for path, mode in reversed(self._modes):
            folder = _walk(self.target, path.split("/"))
            if folder is not None:
                os.fchmod(folder, mode)
                os.close(folder)
        self._close()

    def _close(self) -> None:
        for folder in self._open or ():
            os.close(folder)
        self._open = None

    def remove(self, paths: Iterable[str]) -> None:
        last = "\0"
        for path in paths:
            if path.startswith(f"{last}/"):  # it went with the folder that it was in
                continue
            last = path
            *above, name = path.split("/")
            folder = _walk(self.target, above)
            if folder is not None:
                _remove(folder, name)
                os.close(folder)

    def copy(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        if self._open is None or parent != self._parent:
            self._close()
            here, there = (_walk(top, parent.split("/") if parent else []) for top in (self.source, self.target))
            if here is None or there is None:
                raise OSError(errno.ENOENT, "a folder is not there any more", parent)
            self._parent, self._open = parent, (here, there)
        source, target = self._open
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            self._make_folder(path, name, target, stat.S_IMODE(found.st_mode) & 0o777)
            return
        _remove(target, name)
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISREG(found.st_mode):  # pipes and sockets mean nothing without a process
            self._copy_file(path, name, found)

    def _make_folder(self, path: str, name: str, target: int, mode: int) -> None:
        there = open_subfolder(target, name, os.fstat(target).st_dev)
        if there is None:
            _remove(target, name)
            os.mkdir(name, 0o700, dir_fd=target)
        else:
            os.close(there)
        self._modes.append((path, mode))

    def _copy_file(self, path: str, name: str, found: os.stat_result) -> None:
        assert self._open is not None
        source, target = self._open
        if found.st_ino in self._links:
            os.link(self._links[found.st_ino], name, src_dir_fd=self.target, dst_dir_fd=target)
            return
        if found.st_nlink > 1 and len(path) < MAX_LINKED_PATH_CHARS:
            self._links[found.st_ino] = path
        reading = _open_file(source, name)
        try:
            writing = os.open(name, _NEW, 0o600, dir_fd=target)
            try:
                self._copy_bytes(reading, writing, found.st_size)
                os.fchmod(writing, found.st_mode & 0o777)
                os.utime(writing, ns=(found.st_atime_ns, found.st_mtime_ns))
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _copy_bytes(self, source: int, target: int, size: int) -> None:
        """What was never written takes no room in the copy either."""
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError as fault:
                if fault.errno == errno.ENXIO:  # nothing but a hole
                    break
                raise
            end = min(os.lseek(source, at, os.SEEK_HOLE), size)
            self.bytes_left -= end - at
            if self.bytes_left < 0:
                raise CopyLimitError("more bytes than file_mb allows")
            os.lseek(target, at, os.SEEK_SET)
            while at < end and (sent := os.sendfile(target, source, at, end - at)):
                at += sent
            at = end
        os.ftruncate(target, size)


def _walk(top: int, names: Iterable[str]) -> int | None:
    """The descriptor of a folder below another, reached name by name; None where it is not there."""
    folder, device = os.dup(top), os.fstat(top).st_dev
    for name in names:
        below = open_subfolder(folder, name, device)
        os.close(folder)
        if below is None:
            return None
        folder = below
    return folder


def _remove(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):
            below = open_subfolder(folder, name, os.fstat(folder).st_dev)
            if below is not None:
                empty_folder(below)
                os.close(below)
            os.rmdir(name, dir_fd=folder)


def _open_file(folder: int, name: str) -> int:
    try:
        return os.open(name, _READ, dir_fd=folder)
    except PermissionError:  # closed to its owner, which is who we are
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise
            os.chmod(f"/proc/self/fd/{handle}", 0o600)  # this very file
            return os.open(f"/proc/self/fd/{handle}", _READ & ~os.O_NOFOLLOW)
        finally:
            os.close(handle)
