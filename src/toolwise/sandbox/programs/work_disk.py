"""The disk of one program run: the rollout's files are copied in before it starts and back after it ends."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Lock

from toolwise.sandbox.disk_usage import Disk, ProcFolders
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.descriptors import closing_fd
from toolwise.sandbox.layers.hardening import MEBIBYTE
from toolwise.sandbox.processes import open_channel, receive_descriptors
from toolwise.sandbox.programs.copies import (
    CopyLimitError,
    FolderState,
    copy_changes,
    folder_state,
    wait_for_clock_tick,
)
from toolwise.sandbox.scratch import FOLDER_FLAGS, REMOVE_S, empty_folder


class WorkDisk:
    """`folders`: the rollout's working folder and a temporary folder; `lock` is held while the first is copied."""

    def __init__(self, folders: Sequence[Path], file_mb: int, lock: Lock, closing: ExitStack) -> None:
        self._folders, self._file_mb, self._lock, self._closing = folders, file_mb, lock, closing
        self._disk: Disk | None = None
        self._channel: socket.socket
        self._before: FolderState = {}
        self.full = ""
        """Why the program cannot start: the rollout's files do not fit."""

    @property
    def limited(self) -> bool:
        return self._disk is not None and self._disk.limited

    def open(self, theirs: ExitStack) -> int:
        """Create the channel. Returns the program's end, which is closed with `theirs`."""
        self._channel, child_end = open_channel(self._closing, theirs)
        return child_end

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
