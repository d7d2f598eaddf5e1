"""Measures the disk usage of a worker or program from outside, through descriptors of its folders.

If the folders are separate file systems, the kernel counts and nothing can be hidden. Otherwise the folders are walked,
and unlinked files are found among the open descriptors and memory maps of the processes that hold them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from toolwise.sandbox.layers.disk import MAX_FILES
from toolwise.sandbox.layers.hardening import MEBIBYTE
from toolwise.sandbox.layers.kernel import closing_fd
from toolwise.sandbox.scratch import EMPTY_S, FOLDER_FLAGS, EmptyFolderCache, empty_folder, open_subfolder

MAX_FOLDER_DEPTH = 64
"""Maximum nesting of folders when they are walked."""
_DELETED = " (deleted)"
ProcFolders = Callable[[], Iterable[str]]
"""Returns the /proc folders of the processes that may hold files open."""


class Disk:
    """The writable folders of a worker or of one program run. `paths` are their paths on the host."""

    def __init__(self, paths: Sequence[Path], max_mb: int, descriptors: Sequence[int] = ()) -> None:
        """`descriptors` refer to the same folders as seen by the process itself; this object closes them."""
        self.max_mb = max_mb
        self._paths = tuple(str(path) for path in paths)
        self.folders = list(descriptors) or [os.open(path, FOLDER_FLAGS) for path in paths]
        self.limited = bool(descriptors) and all(
            os.fstat(folder).st_dev != os.stat(path).st_dev for folder, path in zip(self.folders, paths, strict=True)
        )
        """Whether the kernel limits each folder to `max_mb`."""
        self._counts_writes = not self.limited and counts_writes(self.folders[0])
        self._io: int | None = None
        self._written: int | None = None
        self._empty_since = [EmptyFolderCache() for _ in self.folders]
        self._touched = False
        """Whether something was written since the disk was last seen empty."""

    def close(self) -> None:
        descriptors, self.folders = [*self.folders, *([] if self._io is None else [self._io])], []
        self._io = None
        for descriptor in descriptors:
            os.close(descriptor)

    def overflow_reason(self, proc_folders: ProcFolders) -> str:
        """Why the disk is over its limit; "" if it is not."""
        used, files = self._usage_by_statvfs() if self.limited else self._usage_by_walking(proc_folders)
        too_much = used > self.max_mb * MEBIBYTE or files > MAX_FILES
        return f"it filled its folder: more than {self.max_mb} MB or {MAX_FILES:,} files" if too_much else ""

    def may_have_grown(self, proc_folder: str) -> bool:
        """Whether the process at `proc_folder` may have written to disk since the last call.

        A conservative guess that takes microseconds; measuring takes a fraction of a millisecond.
        """
        if self.limited:
            return not self._is_filesystem_empty()
        if self._counts_writes and self._io is None:
            with suppress(OSError):
                self._io = os.open(f"{proc_folder}/io", os.O_RDONLY | os.O_CLOEXEC)
        written = None if self._io is None else _read_written(self._io)
        grown = written is None or written != self._written
        self._written = written
        self._touched |= grown
        return grown

    def is_untouched(self) -> bool:
        """A conservative guess at `is_empty`, right after `may_have_grown`: for one process, in microseconds."""
        if self.limited:
            return self._is_filesystem_empty()
        return not self._touched and all(map(EmptyFolderCache.is_empty, self._empty_since, self.folders))

    def is_empty(self, proc_folders: ProcFolders) -> bool:
        """Whether there are no files, neither named nor unlinked."""
        if self.limited:
            return self._is_filesystem_empty()
        self._touched = any(os.listdir(folder) for folder in self.folders) or any(
            True for _ in self._unnamed_file_sizes(proc_folders)
        )
        return not self._touched

    def _is_filesystem_empty(self) -> bool:
        for folder in self.folders:
            usage = os.fstatvfs(folder)
            if usage.f_bfree != usage.f_blocks or usage.f_files - usage.f_ffree > 1:
                return False
        return True

    def empty(self, seconds: float = EMPTY_S) -> bool:
        """Remove all named files. Returns False if something is left."""
        emptied = [empty_folder(folder, seconds) for folder in self.folders]
        return all(emptied)

    def _usage_by_statvfs(self) -> tuple[int, int]:
        """Bytes and files. A full file system counts as over the limit."""
        usages = [os.fstatvfs(folder) for folder in self.folders]
        used = sum((u.f_blocks - u.f_bfree) * u.f_frsize for u in usages) + (not all(u.f_bfree for u in usages))
        files = sum(u.f_files - u.f_ffree for u in usages) - len(usages)
        return used, files + (0 if all(u.f_ffree for u in usages) else MAX_FILES)

    def _usage_by_walking(self, proc_folders: ProcFolders) -> tuple[int, int]:
        sizes = [*self._named_file_sizes(), *self._unnamed_file_sizes(proc_folders)]
        return sum(sizes), len(sizes)

    def _named_file_sizes(self) -> Iterator[int]:
        """Bytes of each file and folder; stops once there are more than `MAX_FILES`."""
        seen: set[int] = set()
        for _, status, depth in islice(walk(self.folders), MAX_FILES + 1):
            yield 0 if stat.S_ISDIR(status.st_mode) or status.st_ino in seen else status.st_blocks * 512
            if status.st_nlink > 1:
                seen.add(status.st_ino)
            if depth > MAX_FOLDER_DEPTH:
                yield self.max_mb * MEBIBYTE + 1  # nested this deep: treat it as over the limit
                return

    def _unnamed_file_sizes(self, proc_folders: ProcFolders) -> Iterator[int]:
        """Bytes of each unlinked file that a process still holds."""
        sizes: dict[int, int] = {}
        for proc_folder in proc_folders():
            with suppress(OSError):
                for name in os.listdir(f"{proc_folder}/fd"):
                    with suppress(OSError):
                        status = os.stat(f"{proc_folder}/fd/{name}")
                        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                            sizes[status.st_ino] = status.st_blocks * 512
            for inode, span in self._nameless_maps(proc_folder):
                if inode not in sizes:
                    sizes[inode] = self._size_of_map(proc_folder, span)
        yield from sizes.values()

    def _nameless_maps(self, proc_folder: str) -> Iterator[tuple[int, str]]:
        try:
            lines = Path(f"{proc_folder}/maps").read_bytes().splitlines()
        except OSError:
            return
        suffix, prefixes = _DELETED.encode(), tuple(os.fsencode(f"{path}/") for path in self._paths)
        for line in lines:
            fields = line.split(None, 5)
            if line.endswith(suffix) and len(fields) == 6 and fields[5].startswith(prefixes):
                yield int(fields[4]), fields[0].decode()

    def _size_of_map(self, proc_folder: str, span: str) -> int:
        """Size of a mapped file. Only root can read it; otherwise assume the maximum: the map may cover just a part."""
        first, last = (int(word, 16) for word in span.split("-"))
        try:
            return os.stat(f"{proc_folder}/map_files/{first:x}-{last:x}").st_blocks * 512
        except OSError:
            return self.max_mb * MEBIBYTE


def walk(
    folders: Iterable[int], ignore: tuple[type[OSError], ...] = (OSError,)
) -> Iterator[tuple[str, os.stat_result, int]]:
    """Path, status and depth of everything in `folders`, which may change meanwhile; parents before their entries.

    No link is followed and no other device entered. Of each folder at most `MAX_FILES` + 1 entries are listed; `ignore`
    skips what cannot be read.
    """

    def entries(folder: int) -> list[tuple[str, os.stat_result]]:
        listing: list[tuple[str, os.stat_result]] = []
        with suppress(*ignore), os.scandir(folder) as scanned:
            for entry in islice(scanned, MAX_FILES + 1):
                with suppress(*ignore):
                    listing.append((entry.name, entry.stat(follow_symlinks=False)))
        return listing

    stack = [(os.dup(folder), os.fstat(folder).st_dev, "", entries(folder)) for folder in folders]
    try:
        while stack:
            folder, device, path, names = stack[-1]
            if not names:
                os.close(stack.pop()[0])
                continue
            name, status = names.pop()
            subfolder = open_subfolder(folder, name, device) if stat.S_ISDIR(status.st_mode) else None
            if subfolder is not None:
                stack.append((subfolder, device, f"{path}{name}/", []))  # first, so that it is closed whatever happens
                stack[-1][-1].extend(entries(subfolder))
            yield path + name, status, len(stack)
    finally:
        for folder, *_ in stack:
            os.close(folder)


def _read_written(io: int) -> int | None:
    """Bytes a process has written to files, directly or through maps; None if the kernel does not report it."""
    try:
        text = os.pread(io, 512, 0)
        return int(text[text.index(b"\nwrite_bytes:") + 13 :].split(None, 1)[0])
    except (OSError, ValueError, IndexError):
        return None


_writes_counted: dict[int, bool] = {}


def counts_writes(folder: int) -> bool:
    """Whether the kernel counts writes to this file system (not on a tmpfs). Tested by writing a file."""
    device = os.fstat(folder).st_dev
    if device not in _writes_counted:
        _writes_counted[device] = _try_writing(folder)
    return _writes_counted[device]


def _try_writing(folder: int) -> bool:
    name = ".toolwise-measured"
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open("/proc/thread-self/io", "rb") as io, closing_fd(os.open(name, flags, 0o600, dir_fd=folder)) as file:
            os.unlink(name, dir_fd=folder)
            before = _read_written(io.fileno())
            os.write(file, b"x")
            return before is not None and _read_written(io.fileno()) != before
    except OSError:
        return False
