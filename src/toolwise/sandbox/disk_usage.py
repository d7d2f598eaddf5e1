"""What a worker or a program has on disk, seen from outside by the descriptors of its folders.

Where the folders are file systems of their own, the kernel counts and nothing can be hidden from it. Elsewhere they are
walked, and files without names are found among the descriptors and maps of the processes that keep them.
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
from toolwise.sandbox.scratch import EMPTY_S, FOLDER_FLAGS, EmptyFolderCache, empty_folder, open_subfolder

MAX_FOLDER_DEPTH = 64
"""Of folders in folders, where they are walked."""
_DELETED = " (deleted)"
ProcFolders = Callable[[], Iterable[str]]
"""The folders in /proc of the processes that may keep files."""


class Disk:
    """The writable folders of a worker, or of one run of a program. `paths` are their names out here."""

    def __init__(self, paths: Sequence[Path], max_mb: int, descriptors: Sequence[int] = ()) -> None:
        """`descriptors`, of the same folders as the process itself sees them, are this object's to close."""
        self.max_mb = max_mb
        self._paths = tuple(str(path) for path in paths)
        self.folders = list(descriptors) or [os.open(path, FOLDER_FLAGS) for path in paths]
        self._device = os.fstat(self.folders[0]).st_dev
        self.limited = bool(descriptors) and all(
            os.fstat(folder).st_dev != os.stat(path).st_dev for folder, path in zip(self.folders, paths, strict=True)
        )
        """Whether the kernel lets nobody write more than `max_mb` to each folder."""
        self._counts_writes = not self.limited and counts_writes(self.folders[0])
        self._io: int | None = None
        self._written: int | None = None
        self._empty_since: dict[int, EmptyFolderCache] = {}
        self._touched = False
        """Whether something was written since it was last seen to be empty."""

    def close(self) -> None:
        descriptors, self.folders = [*self.folders, *([] if self._io is None else [self._io])], []
        self._io = None
        for descriptor in descriptors:
            os.close(descriptor)

    def overflow_reason(self, proc_folders: ProcFolders) -> str:
        """What is wrong with it; "" where nothing is."""
        used, files = self._usage_by_statvfs() if self.limited else self._usage_by_walking(proc_folders)
        too_much = used > self.max_mb * MEBIBYTE or files > MAX_FILES
        return f"it filled its folder: more than {self.max_mb} MB or {MAX_FILES:,} files" if too_much else ""

    def may_have_grown(self, proc_folder: str) -> bool:
        """Whether the process at `proc_folder` has written to a disk since this was last asked. A guess on the safe
        side that
        takes microseconds, where measuring takes a fraction of a millisecond."""
        if self.limited:
            return not self._is_filesystem_empty()
        written = self._bytes_written(proc_folder) if self._counts_writes else None
        grown = written is None or written != self._written
        self._written = written
        self._touched |= grown
        return grown

    def _bytes_written(self, proc_folder: str) -> int | None:
        if self._io is None:
            with suppress(OSError):
                self._io = os.open(f"{proc_folder}/io", os.O_RDONLY | os.O_CLOEXEC)
        return None if self._io is None else _read_written(self._io)

    def is_untouched(self) -> bool:
        """A guess at `is_empty` on the safe side, right after `may_have_grown`: of one process, in microseconds."""
        if self.limited:
            return self._is_filesystem_empty()
        return not self._touched and all(map(self._is_folder_empty, self.folders))

    def is_empty(self, proc_folders: ProcFolders) -> bool:
        """Whether there is nothing: no file with a name, and none without."""
        if self.limited:
            return self._is_filesystem_empty()
        self._touched = any(os.listdir(folder) for folder in self.folders) or any(
            True for _ in self._unnamed_file_sizes(proc_folders)
        )
        return not self._touched

    def _is_filesystem_empty(self) -> bool:
        for folder in self.folders:
            found = os.fstatvfs(folder)
            if found.f_bfree != found.f_blocks or found.f_files - found.f_ffree > 1:
                return False
        return True

    def _is_folder_empty(self, folder: int) -> bool:
        found, since = os.fstat(folder), self._empty_since.setdefault(folder, EmptyFolderCache())
        if since.is_still_empty(found):
            return True
        if os.listdir(folder):
            return False
        since.record_empty(found)
        return True

    def empty(self, seconds: float = EMPTY_S) -> bool:
        """Removes what has a name. False where something is left."""
        emptied = [empty_folder(folder, seconds) for folder in self.folders]
        return all(emptied)

    def _usage_by_statvfs(self) -> tuple[int, int]:
        """Bytes and files. A file system without room left counts as one that holds too much."""
        found = [os.fstatvfs(folder) for folder in self.folders]
        used = sum((f.f_blocks - f.f_bfree) * f.f_frsize for f in found) + (not all(f.f_bfree for f in found))
        files = sum(f.f_files - f.f_ffree for f in found) - len(found)
        return used, files + (0 if all(f.f_ffree for f in found) else MAX_FILES)

    def _usage_by_walking(self, proc_folders: ProcFolders) -> tuple[int, int]:
        sizes = [*self._named_file_sizes(), *self._unnamed_file_sizes(proc_folders)]
        return sum(sizes), len(sizes)

    def _named_file_sizes(self) -> Iterator[int]:
        """Bytes of each file and folder; one more than too many end it."""
        seen: set[int] = set()
        count = 0
        stack = [(os.dup(folder), _entries(folder)) for folder in self.folders]
        try:
            while stack:
                folder, entries = stack[-1]
                if not entries or count > MAX_FILES:
                    os.close(stack.pop()[0])
                    continue
                name, found = entries.pop()
                count += 1
                is_folder = stat.S_ISDIR(found.st_mode)
                yield 0 if is_folder or found.st_ino in seen else found.st_blocks * 512
                if found.st_nlink > 1:
                    seen.add(found.st_ino)
                below = open_subfolder(folder, name, self._device) if is_folder else None
                if below is not None:
                    stack.append((below, _entries(below)))
                if len(stack) > MAX_FOLDER_DEPTH:
                    yield self.max_mb * MEBIBYTE + 1  # who nests so deep hides something
                    return
        finally:
            for folder, _ in stack:
                os.close(folder)

    def _unnamed_file_sizes(self, proc_folders: ProcFolders) -> Iterator[int]:
        """Bytes of each file that processes keep after its name is gone."""
        kept: dict[int, int] = {}
        for proc_folder in proc_folders():
            with suppress(OSError):
                for name in os.listdir(f"{proc_folder}/fd"):
                    with suppress(OSError):
                        found = os.stat(f"{proc_folder}/fd/{name}")
                        if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                            kept[found.st_ino] = found.st_blocks * 512
            for inode, span in self._nameless_maps(proc_folder):
                if inode not in kept:
                    kept[inode] = self._size_of_map(proc_folder, span)
        yield from kept.values()

    def _nameless_maps(self, proc_folder: str) -> Iterator[tuple[int, str]]:
        try:
            lines = Path(f"{proc_folder}/maps").read_bytes().splitlines()
        except OSError:
            return
        ending, starts = _DELETED.encode(), tuple(os.fsencode(f"{path}/") for path in self._paths)
        for line in lines:
            words = line.split(None, 5)
            if line.endswith(ending) and len(words) == 6 and words[5].startswith(starts):
                yield int(words[4]), words[0].decode()

    def _size_of_map(self, proc_folder: str, span: str) -> int:
        """All of what a file may hold, where only root may ask for more than the part that is mapped."""
        first, last = (int(word, 16) for word in span.split("-"))
        try:
            return os.stat(f"{proc_folder}/map_files/{first:x}-{last:x}").st_blocks * 512
        except OSError:
            return self.max_mb * MEBIBYTE


def _entries(folder: int) -> list[tuple[str, os.stat_result]]:
    """What is in a folder; of more than too many not all."""
    found: list[tuple[str, os.stat_result]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, MAX_FILES + 1):
            with suppress(OSError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    return found


def bytes_written(proc_folder: str) -> int | None:
    """Bytes of files that a process has changed, by writing or through maps; None where the kernel does not tell."""
    try:
        descriptor = os.open(f"{proc_folder}/io", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read_written(descriptor)
    finally:
        os.close(descriptor)


def _read_written(io: int) -> int | None:
    try:
        text = os.pread(io, 512, 0)
        return int(text[text.index(b"\nwrite_bytes:") + 13 :].split(None, 1)[0])
    except (OSError, ValueError, IndexError):
        return None


_counted: dict[int, bool] = {}


def counts_writes(folder: int) -> bool:
    """Whether the kernel counts what is written to this file system: not on a tmpfs. Found by writing there."""
    device = os.fstat(folder).st_dev
    if device not in _counted:
        _counted[device] = _try_writing(folder)
    return _counted[device]


def _try_writing(folder: int) -> bool:
    name, me = ".toolwise-measured", "/proc/thread-self"
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            before = bytes_written(me)
            os.write(descriptor, b"x")
            return before is not None and bytes_written(me) != before
        finally:
            os.close(descriptor)
            os.unlink(name, dir_fd=folder)
    except OSError:
        return False
