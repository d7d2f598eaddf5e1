"""Landlock through raw system calls: limits what a worker may read and write, even as root."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from toolwise.sandbox.layers.kernel import closing_fd, libc, raise_errno
from toolwise.sandbox.layers.syscalls import LANDLOCK_ADD_RULE, LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FIRST_RIGHTS = (1 << 13) - 1
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
SOCKETS_AND_DEVICES = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11
"""MAKE_CHAR, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK: not needed in a scratch folder."""
FOR_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
NET_TCP = 0b11
ABSTRACT_SOCKETS, SIGNALS = 0b01, 0b10
"""Scopes: what may not leave the sandbox."""
SCOPES_SINCE = 6
PATH_BENEATH = 1


def abi() -> int:
    """The Landlock ABI version of this kernel; 0 if it has none."""
    try:
        version = libc().syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except (AttributeError, OSError):
        return 0
    return max(int(version), 0)


def handled_rights(version: int) -> int:
    return FIRST_RIGHTS | sum(right for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)) if version >= since)


def restrict(
    read: Iterable[str], write: Iterable[str], *, devices: Iterable[str] = (), network: bool = False, run: bool = False
) -> int:
    """Restrict this process, irrevocably, to reading `read` and writing `write`. Returns the ABI version."""
    version = abi()
    if version < 1:
        raise OSError("this kernel has no Landlock")
    rights = handled_rights(version)
    net_rights = NET_TCP if version >= 4 and not network else 0
    scopes = (SIGNALS if network else SIGNALS | ABSTRACT_SOCKETS) if version >= SCOPES_SINCE else 0
    attributes = struct.pack("=QQQ", rights, net_rights, scopes)[
        : 8 if version < 4 else 16 if version < SCOPES_SINCE else 24
    ]
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = libc().syscall(LANDLOCK_CREATE_RULESET, buffer, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        raise_errno("landlock_create_ruleset")
    with closing_fd(ruleset):
        for path in read:
            _allow(ruleset, path, READ_FILE | READ_DIR | (EXECUTE if run else 0))
        for path in devices:
            _allow(ruleset, path, READ_FILE | WRITE_FILE)
        for path in write:
            _allow(ruleset, path, rights & ~EXECUTE & ~SOCKETS_AND_DEVICES | (EXECUTE if run else 0))
        if libc().syscall(LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)) != 0:
            raise_errno("landlock_restrict_self")
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # missing or inaccessible paths need no rule
        return
    with closing_fd(path_fd):
        if not stat.S_ISDIR(os.fstat(path_fd).st_mode):
            rights &= FOR_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, path_fd), 12)
        if libc().syscall(LANDLOCK_ADD_RULE, ruleset, PATH_BENEATH, rule, ctypes.c_uint32(0)) != 0:
            raise_errno(f"landlock: {path}")
