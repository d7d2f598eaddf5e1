"""Copies of a rollout's files: into the file system that one call works in, and back when nothing of the call lives.

What a program leaves is a stranger's: no link is followed, and depth, number and size have limits.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass, field

from toolwise.sandbox.disk_usage import MOST_DEPTH
from toolwise.sandbox.layers.disk import MOST_FILES
from toolwise.sandbox.scratch import FOLDER, open_inside

CLOCK_REALTIME_COARSE = 5
"""The clock that changes are stamped with."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
State = dict[str, tuple[int, int]]
"""Path -> inode and time of change, of all that is in a folder."""


class TooMuchError(Exception):
    """There is more than may be copied."""


@dataclass(slots=True)
class _Level:
    source: int
    target: int
    path: str
    names: list[str]
    mode: int
    name: str = ""


@dataclass(slots=True)
class _Copy:
    top: int
    device: int
    bytes_left: int
    files: int = 0
    links: dict[int, str] = field(default_factory=dict)
    """Inode -> where the first of its names was copied to."""


def copy_tree(source: int, target: int, most_bytes: int) -> None:
    """Copies all files, folders and links in one folder into another, which is empty."""
    found = os.fstat(source)
    copy = _Copy(target, found.st_dev, most_bytes)
    levels = [_Level(os.dup(source), os.dup(target), "", os.listdir(source), stat.S_IMODE(found.st_mode))]
    try:
        while levels:
            level = levels[-1]
            if level.names:
                below = _copy_entry(copy, level, level.names.pop())
                if below is not None:
                    levels.append(below)
                if copy.files > MOST_FILES or len(levels) > MOST_DEPTH:
                    raise TooMuchError(f"more than {MOST_FILES:,} files, or than {MOST_DEPTH} folders in each other")
                continue
            if level.path:
                os.fchmod(level.target, level.mode & 0o777)
            _close(levels.pop())
    finally:
        for level in levels:
            _close(level)


def _close(level: _Level) -> None:
    os.close(level.source)
    os.close(level.target)


def _copy_entry(copy: _Copy, level: _Level, name: str) -> _Level | None:
    """A folder is made and returned, to be filled; what is neither file nor link is left out."""
    copy.files += 1
    found = os.stat(name, dir_fd=level.source, follow_symlinks=False)
    path = f"{level.path}/{name}" if level.path else name
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(name, dir_fd=level.source), name, dir_fd=level.target)
    elif stat.S_ISREG(found.st_mode):
        if found.st_nlink > 1 and found.st_ino in copy.links:
            os.link(copy.links[found.st_ino], name, src_dir_fd=copy.top, dst_dir_fd=level.target)
            return None
        if found.st_nlink > 1 and len(path) < 1000:  # a name that a call takes
            copy.links[found.st_ino] = path
        _copy_file(copy, level, name)
    elif stat.S_ISDIR(found.st_mode):
        below = open_inside(level.source, name, copy.device)
        if below is None:
            return None
        os.mkdir(name, 0o700, dir_fd=level.target)
        made = os.open(name, FOLDER, dir_fd=level.target)
        return _Level(below, made, path, os.listdir(below), stat.S_IMODE(found.st_mode))
    return None


def _copy_file(copy: _Copy, level: _Level, name: str) -> None:
    """Only what is there of it: what was never written takes no room in the copy either."""
    source = _open_file(level.source, name)
    try:
        found = os.fstat(source)
        target = os.open(name, _NEW, 0o600, dir_fd=level.target)
        try:
            at = 0
            while at < found.st_size:
                try:
                    at = os.lseek(source, at, os.SEEK_DATA)
                except OSError as fault:
                    if fault.errno == errno.ENXIO:
                        break
                    raise
                end = os.lseek(source, at, os.SEEK_HOLE)
                copy.bytes_left -= end - at
                if copy.bytes_left < 0:
                    raise TooMuchError("more bytes than file_mb allows")
                os.lseek(target, at, os.SEEK_SET)
                while at < end and (sent := os.sendfile(target, source, at, end - at)):
                    at += sent
                at = max(at, end)
            os.ftruncate(target, found.st_size)
            os.fchmod(target, found.st_mode & 0o777)
            os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)


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


def state_of(folder: int) -> State | None:
    """What there is, so that a later change can be told; None where there is too much to look at."""
    state: State = {}
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
            here = f"{path}/{name}"
            state[here] = (found.st_ino, found.st_ctime_ns)
            below = open_inside(at, name, device) if stat.S_ISDIR(found.st_mode) else None
            if below is not None:
                levels.append((below, here, os.listdir(below)))
            if len(state) > MOST_FILES or len(levels) > MOST_DEPTH:
                return None
        return state
    finally:
        for at, _, _ in levels:
            os.close(at)


def wait_for_the_clock() -> None:
    """Until the kernel gives another time to what changes: a few milliseconds."""
    now = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == now:
        time.sleep(0.0005)
