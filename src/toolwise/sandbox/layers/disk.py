"""A process's writable folders as file systems of a fixed size: nothing that it does there can take more.

Each is a tmpfs: the kernel counts files without names, maps, sparse and nested files like all others. It needs a mount
namespace: bubblewrap has made one, or the process may make its own. Where it may not, its folders stay the trainer's,
which measures them (`disk_usage.py`).
"""

from __future__ import annotations

import array
import ctypes
import os
import sys
from collections.abc import Iterable

from toolwise.sandbox.layers.kernel import drop_capabilities, libc, raise_errno

MAX_FILES = 10_000
"""In the folders of one worker or program."""
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18


def limit_folders(folders: Iterable[str], max_mb: int) -> str:
    """Mounts a tmpfs over each of this process's folders, for it and what it starts. "" or why it cannot be done."""
    if sys.platform != "linux":
        return f"this is {sys.platform}"
    here = os.getcwd()
    try:
        apart = _unshare_mounts()
        options = f"size={max_mb}m,nr_inodes={MAX_FILES},mode=700".encode()
        for folder in folders:
            _mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options)
        if apart:
            drop_capabilities()  # those that it has in its own namespace
    except (OSError, AttributeError) as fault:
        return str(fault)
    finally:
        os.chdir(here)  # by its name, which is another folder's now
    return ""


def is_limited(folder: str, max_mb: int) -> bool:
    """Whether a folder is a file system of at most this size."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize <= max_mb << 20


def send_folders(channel: int, folders: Iterable[str], payload: bytes) -> None:
    """Gives descriptors of folders, by the names that they have here, to whoever reads `payload`."""
    import _socket  # the module under `socket`, which every program would wait for

    opened: list[int] = []
    way = _socket.socket(fileno=channel)
    try:
        opened.extend(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for folder in folders)
        way.sendmsg([payload], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", opened))])
    finally:
        way.detach()
        for descriptor in opened:
            os.close(descriptor)


def _unshare_mounts() -> bool:
    """A mount namespace of its own. Whether that took a user namespace too."""
    apart = False
    if libc().unshare(CLONE_NEWNS) != 0:
        user, group = os.geteuid(), os.getegid()
        if libc().unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0:
            raise_errno("unshare")
        apart = True
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    return apart


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    if libc().mount(source, target, kind, ctypes.c_ulong(flags), options) != 0:
        raise_errno(f"mount {os.fsdecode(target)}")
