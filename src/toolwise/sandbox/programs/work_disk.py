"""The disk of one run of a program: its rollout's files are put there before it begins and taken back after it."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock

from toolwise.sandbox.disk_usage import Disk, Places
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.hardening import MEBIBYTE
from toolwise.sandbox.programs.copies import State, TooMuchError, copy_changes, state_of, wait_for_the_clock
from toolwise.sandbox.scratch import FOLDER, empty_folder

_ONE = struct.Struct("i")


class WorkDisk:
    """`folders`: the rollout's working folder and that of temporary files; `lock` is held while the first is copied."""

    def __init__(self, folders: Sequence[Path], file_mb: int, lock: Lock, closing: ExitStack) -> None:
        self._folders, self._file_mb, self._lock, self._closing = folders, file_mb, lock, closing
        self._disk: Disk | None = None
        self._channel: socket.socket
        self._before: State = {}
        self.full = ""
        """Why the program cannot begin: its rollout's files do not fit."""

    @property
    def limited(self) -> bool:
        return self._disk is not None and self._disk.limited

    def open(self, theirs: ExitStack) -> int:
        """The end of a channel that the program is given, to be closed with `theirs`."""
        ours, given = socket.socketpair()
        self._channel = self._closing.enter_context(ours)
        return theirs.enter_context(given).fileno()

    def listen(self, poll: select.poll) -> None:
        poll.register(self._channel, select.POLLIN)

    def answer(self, ready: Sequence[int], poll: select.poll) -> None:
        """Once the program's process has made its folders what they are: fills them and lets it begin."""
        if self._channel.fileno() not in ready:
            return
        poll.unregister(self._channel)
        said, given, _, _ = self._channel.recvmsg(1, socket.CMSG_SPACE(2 * _ONE.size), socket.MSG_CMSG_CLOEXEC)
        if not said:  # it ended
            return
        received = [number for _, _, packed in given for (number,) in _ONE.iter_unpack(packed)]
        if len(received) != len(self._folders):
            raise SandboxError("a program's folders did not come through: are there too many open files?")
        self._disk = Disk(self._folders, self._file_mb, received)
        self._closing.callback(self._disk.close)
        try:
            if self._disk.limited:
                self._fill(self._disk.folders[0])
        except TooMuchError as fault:
            self.full = f"the files of its folder do not fit: {fault}"
            return
        except OSError as fault:
            raise SandboxError(f"the files of a program's folder cannot be given to it: {fault}") from None
        with suppress(OSError):  # it may have ended meanwhile
            self._channel.send(b"x")

    def _fill(self, inside: int) -> None:
        with self._lock, _opened(self._folders[0]) as outside:
            if copy_changes(outside, inside, {}, self._file_mb * MEBIBYTE):
                wait_for_the_clock()
                self._before = state_of(inside)

    def is_full(self, places: Places) -> str:
        return self._disk.is_full(places) if self._disk is not None else ""

    def take_back(self) -> str:
        """After its end: has the rollout's folder follow what the program did. "" or why it is emptied instead."""
        if self._disk is None:
            return ""
        with self._lock, _opened(self._folders[0]) as outside:
            try:
                full = self.full or self._disk.is_full(lambda: ()) or self._copy_back(self._disk, outside)
            except TooMuchError as fault:
                full = f"it filled its folder: {fault}"
            except OSError as fault:
                raise SandboxError(f"the files of a program cannot be kept: {fault}") from None
            if full and not empty_folder(outside):
                raise SandboxError(f"{self._folders[0]} cannot be emptied")
        return full

    def _copy_back(self, disk: Disk, outside: int) -> str:
        if not disk.limited or not copy_changes(disk.folders[0], outside, self._before, self._file_mb * MEBIBYTE):
            return ""
        together = Disk([self._folders[0]], self._file_mb)  # with what other calls have left there meanwhile
        try:
            return together.is_full(lambda: ())
        finally:
            together.close()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, FOLDER)
    try:
        yield folder
    finally:
        os.close(folder)
