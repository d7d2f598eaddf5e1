"""Copies a rollout's files into the file system of one call, and back once all processes of the call have ended.

Only changes are copied, so that concurrent calls do not overwrite each other's files. The files are untrusted: no link
is followed, and depth, number and size are limited.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from toolwise.sandbox.disk_usage import MAX_FOLDER_DEPTH, walk
from toolwise.sandbox.layers.disk import MAX_FILES
from toolwise.sandbox.layers.kernel import closing_fd
from toolwise.sandbox.scratch import empty_folder, open_subfolder

CLOCK_REALTIME_COARSE = 5
"""The clock of file timestamps."""
MAX_PATH_CHARS = 4 << 20
"""Characters in all paths together: long names at great depth would keep the trainer busy for seconds."""
MAX_LINKED_PATH_CHARS = 1000
"""Hard links are kept up to this path length; files with longer paths are copied again."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FolderState = dict[str, tuple[int, int]]
"""Path -> inode and ctime of everything in a folder; parents come before their entries."""


class CopyLimitError(Exception):
    """The files exceed what may be copied."""


def folder_state(folder: int) -> FolderState:
    state: FolderState = {}
    length = 0
    for path, status, depth in walk([folder], ignore=()):
        state[path] = (status.st_ino, status.st_ctime_ns)
        length += len(path)
        if len(state) > MAX_FILES or depth > MAX_FOLDER_DEPTH:
            raise CopyLimitError(f"more than {MAX_FILES:,} files, or folders nested more than {MAX_FOLDER_DEPTH} deep")
        if length > MAX_PATH_CHARS:
            raise CopyLimitError("paths that are too long in total")
    return state


def wait_for_clock_tick() -> None:
    """Wait a few milliseconds until new changes get a different timestamp."""
    now = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == now:
        time.sleep(0.0005)


def copy_changes(source: int, target: int, before: FolderState, max_bytes: int) -> bool:
    """Apply to `target` what changed in `source` since the state `before`. Returns whether anything changed."""
    after = folder_state(source)
    if after == before:
        return False
    with _Copy(source, target, max_bytes) as copy:
        copy.remove(path for path in before if path not in after)
        for path, entry in after.items():
            if before.get(path) != entry:
                copy.copy(path)
    return True


@dataclass(slots=True)
class _Copy:
    source: int
    target: int
    bytes_left: int
    _parent: str = ""
    _open: tuple[int, int] | None = None
    """Descriptors of the last path's parent, in source and target."""
    _links: dict[int, str] = field(default_factory=dict)
    """Inode -> target path of its first name."""
    _modes: list[tuple[str, int]] = field(default_factory=list)
    """Modes of folders: set last, since a folder without write permission cannot be filled."""

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
            if path.startswith(f"{last}/"):  # removed together with its parent
                continue
            last = path
            *parents, name = path.split("/")
            folder = _walk(self.target, parents)
            if folder is not None:
                _remove(folder, name)
                os.close(folder)

    def copy(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        if self._open is None or parent != self._parent:
            self._close()
            source_parent, target_parent = (
                _walk(top, parent.split("/") if parent else []) for top in (self.source, self.target)
            )
            if source_parent is None or target_parent is None:
                raise OSError(errno.ENOENT, "the folder no longer exists", parent)
            self._parent, self._open = parent, (source_parent, target_parent)
        source, target = self._open
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            self._make_folder(path, name, target, stat.S_IMODE(status.st_mode) & 0o777)
            return
        _remove(target, name)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISREG(status.st_mode):  # pipes and sockets are useless without a process
            self._copy_file(path, name, status)

    def _make_folder(self, path: str, name: str, target: int, mode: int) -> None:
        existing = open_subfolder(target, name, os.fstat(target).st_dev)
        if existing is None:
            _remove(target, name)
            os.mkdir(name, 0o700, dir_fd=target)
        else:
            os.close(existing)
        self._modes.append((path, mode))

    def _copy_file(self, path: str, name: str, status: os.stat_result) -> None:
        assert self._open is not None
        source, target = self._open
        if status.st_ino in self._links:
            os.link(self._links[status.st_ino], name, src_dir_fd=self.target, dst_dir_fd=target)
            return
        if status.st_nlink > 1 and len(path) < MAX_LINKED_PATH_CHARS:
            self._links[status.st_ino] = path
        with (
            closing_fd(_open_file(source, name)) as source_fd,
            closing_fd(os.open(name, _NEW, 0o600, dir_fd=target)) as target_fd,
        ):
            self._copy_bytes(source_fd, target_fd, status.st_size)
            os.fchmod(target_fd, status.st_mode & 0o777)
            os.utime(target_fd, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _copy_bytes(self, source: int, target: int, size: int) -> None:
        """Copy the data of a sparse file; holes stay holes."""
        offset = 0
        while offset < size:
            try:
                offset = os.lseek(source, offset, os.SEEK_DATA)
            except OSError as fault:
                if fault.errno == errno.ENXIO:  # nothing but a hole
                    break
                raise
            end = min(os.lseek(source, offset, os.SEEK_HOLE), size)
            self.bytes_left -= end - offset
            if self.bytes_left < 0:
                raise CopyLimitError("more bytes than file_mb allows")
            os.lseek(target, offset, os.SEEK_SET)
            while offset < end and (sent := os.sendfile(target, source, offset, end - offset)):
                offset += sent
            offset = end
        os.ftruncate(target, size)


def _walk(top: int, names: Iterable[str]) -> int | None:
    """Open a nested folder name by name; None if it does not exist."""
    folder, device = os.dup(top), os.fstat(top).st_dev
    for name in names:
        subfolder = open_subfolder(folder, name, device)
        os.close(folder)
        if subfolder is None:
            return None
        folder = subfolder
    return folder


def _remove(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):
            subfolder = open_subfolder(folder, name, os.fstat(folder).st_dev)
            if subfolder is not None:
                empty_folder(subfolder)
                os.close(subfolder)
            os.rmdir(name, dir_fd=folder)


def _open_file(folder: int, name: str) -> int:
    try:
        return os.open(name, _READ, dir_fd=folder)
    except PermissionError:  # its mode forbids reading to its owner, which is us
        with closing_fd(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)) as handle:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise
            os.chmod(f"/proc/self/fd/{handle}", 0o600)  # this very file, even if its name now refers to another
            return os.open(f"/proc/self/fd/{handle}", _READ & ~os.O_NOFOLLOW)
