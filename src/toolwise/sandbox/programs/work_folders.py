"""Working folders of programs, one per rollout, kept between calls; and the disk of one call.

The rollout's files are copied to that disk before a program starts, and back after it ends.
"""

from __future__ import annotations

import os
import select
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from toolwise.errors import DataError
from toolwise.sandbox.disk_usage import Disk, ProcFolders
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.hardening import MEBIBYTE
from toolwise.sandbox.layers.kernel import closing_fd
from toolwise.sandbox.processes import open_channel, receive_descriptors
from toolwise.sandbox.programs.copies import (
    CopyLimitError,
    FolderState,
    copy_changes,
    folder_state,
    wait_for_clock_tick,
)
from toolwise.sandbox.scratch import FOLDER_FLAGS, REMOVE_S, empty_folder, remove_in_background
from toolwise.sandbox.scratch_root import ScratchRoot


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """The folder of one rollout; programs see only `work_path`."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held while its files are copied."""

    @property
    def work_path(self) -> Path:
        return self.path / "work"


class WorkFolders:
    """All folders of one sandbox, under a root that exists while any of them does. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._root = threading.Lock(), ScratchRoot()
        self._open: set[WorkFolder] = set()

    def open(self, files: Mapping[str, str]) -> WorkFolder:
        """Create a folder with `files` (name -> text) in it."""
        with self._lock:
            folder = WorkFolder(self._root.new_folder())
            self._open.add(folder)
        try:
            folder.work_path.mkdir(mode=0o700)
            for name, text in files.items():
                _write_file(folder.work_path, name, text)
        except BaseException:
            self.remove(folder)
            raise
        return folder

    def temporary(self, folder: WorkFolder) -> Path:
        """Create a temporary folder for one call, beside the working folder."""
        return Path(tempfile.mkdtemp(prefix="tmp-", dir=folder.path))

    def remove(self, folder: WorkFolder) -> None:
        remove_in_background(folder.path)
        with self._lock:
            self._open.discard(folder)
            if self._open:
                return
        self.close()

    def close(self) -> None:
        with self._lock:
            root, self._root = self._root, ScratchRoot()
            self._open.clear()
        root.close()


def _write_file(folder: Path, name: str, text: str) -> None:
    relative = PurePosixPath(name)
    if not name or relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise DataError(f"files: {name!r} is not a relative path in the working folder; write one like 'data/rows.csv'")
    if not isinstance(text, str):
        raise DataError(f"files: {name} must be a string, got {type(text).__name__}")
    path = folder / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")


class WorkDisk:
    """`folders`: the rollout's working folder and a temporary folder; `lock` is held while the first is copied."""

    def __init__(
        self, folders: Sequence[Path], file_mb: int, lock: threading.Lock, ours: ExitStack, theirs: ExitStack
    ) -> None:
        """The stacks close the two ends of its channel; `child_end` is the program's."""
        self._folders, self._file_mb, self._lock, self._closing = folders, file_mb, lock, ours
        self._channel, self.child_end = open_channel(ours, theirs)
        self._disk: Disk | None = None
        self._before: FolderState = {}
        self.full = ""
        """Why the program cannot start: the rollout's files do not fit."""

    @property
    def limited(self) -> bool:
        return self._disk is not None and self._disk.limited

    def listen(self, poll: select.poll) -> None:
        poll.register(self._channel, select.POLLIN)

    def answer(self, ready: Sequence[int], poll: select.poll) -> None:
        """Once the program's process has mounted its folders, fill them and let it start."""
        if self._channel.fileno() not in ready:
            return
        poll.unregister(self._channel)
        data, descriptors = receive_descriptors(self._channel, 1, len(self._folders))
        if not data:  # it ended
            return
        if len(descriptors) != len(self._folders):
            raise SandboxError("the folder descriptors of a program did not arrive: are there too many open files?")
        self._disk = Disk(self._folders, self._file_mb, descriptors)
        self._closing.callback(self._disk.close)
        try:
            if self._disk.limited:
                self._fill(self._disk.folders[0])
        except CopyLimitError as fault:
            self.full = f"the files of its folder do not fit: {fault}"
            return
        except OSError as fault:
            raise SandboxError(f"cannot copy the files of a program's folder to its disk: {fault}") from None
        with suppress(OSError):  # it may have ended in the meantime
            self._channel.send(b"x")

    def _fill(self, inside: int) -> None:
        with self._lock, closing_fd(os.open(self._folders[0], FOLDER_FLAGS)) as outside:
            if copy_changes(outside, inside, {}, self._file_mb * MEBIBYTE):
                wait_for_clock_tick()
                self._before = folder_state(inside)

    def overflow_reason(self, proc_folders: ProcFolders) -> str:
        return self._disk.overflow_reason(proc_folders) if self._disk is not None else ""

    def save_files(self) -> str:
        """After its end, copy the program's changes to the rollout's folder. "" or why that was emptied instead."""
        if self._disk is None:
            return ""
        with self._lock, closing_fd(os.open(self._folders[0], FOLDER_FLAGS)) as outside:
            try:
                reason = self.full or self._disk.overflow_reason(lambda: ()) or self._copy_back(self._disk, outside)
            except CopyLimitError as fault:
                reason = f"it filled its folder: {fault}"
            except OSError as fault:
                raise SandboxError(f"cannot copy back the files of a program: {fault}") from None
            if reason and not empty_folder(outside, REMOVE_S):  # it may have made ten thousands of files
                raise SandboxError(f"{self._folders[0]} cannot be emptied")
        return reason

    def _copy_back(self, disk: Disk, outside: int) -> str:
        if not disk.limited or not copy_changes(disk.folders[0], outside, self._before, self._file_mb * MEBIBYTE):
            return ""
        with closing(Disk([self._folders[0]], self._file_mb)) as combined:  # including files of concurrent calls
            return combined.overflow_reason(lambda: ())
