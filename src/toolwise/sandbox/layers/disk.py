"""Mounts the writable folders of a process as file systems of a fixed size, which nothing can exceed.

Each is a tmpfs: the kernel counts unlinked, mapped, sparse and nested files like all others. This needs a mount
namespace, from bubblewrap or created by the process itself. If neither works, the process uses the original folders and
the trainer measures them (`disk_usage.py`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack

from toolwise.sandbox.layers.kernel import closing_fd, drop_capabilities, libc, raise_errno, send_descriptors

MAX_FILES = 10_000
"""Maximum number of files in the folders of one worker or program."""
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18


def limit_folders(folders: Iterable[str], max_mb: int) -> str:
    """Mount a tmpfs over each folder, for this process and its children. Returns "" or why that failed."""
    if sys.platform != "linux":
        return f"this is {sys.platform}"
    here = os.getcwd()
    try:
        new_user_namespace = _unshare_mounts()
        options = f"size={max_mb}m,nr_inodes={MAX_FILES},mode=700".encode()
        for folder in folders:
            _mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options)
        if new_user_namespace:
            drop_capabilities()  # those it has in its own user namespace
    except (OSError, AttributeError) as fault:
        return str(fault)
    finally:
        os.chdir(here)  # by path, which now refers to the new mount
    return ""


def is_limited(folder: str, max_mb: int) -> bool:
    """Whether the folder is on a file system of at most this size."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize <= max_mb << 20


def send_folders(channel: int, folders: Iterable[str], payload: bytes) -> None:
    """Send `payload` through `channel` with descriptors of the folders, opened by their paths in this process."""
    with ExitStack() as opened:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        send_descriptors(channel, payload, [opened.enter_context(closing_fd(os.open(f, flags))) for f in folders])


def _unshare_mounts() -> bool:
    """Enter a new mount namespace. Returns whether that required a new user namespace too."""
    new_user_namespace = False
    if libc().unshare(CLONE_NEWNS) != 0:
        user, group = os.geteuid(), os.getegid()
        if libc().unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0:
            raise_errno("unshare")
        new_user_namespace = True
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    return new_user_namespace


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    if libc().mount(source, target, kind, ctypes.c_ulong(flags), options) != 0:
        raise_errno(f"mount {os.fsdecode(target)}")
