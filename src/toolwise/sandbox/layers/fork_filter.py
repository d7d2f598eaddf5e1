"""A seccomp filter that makes each fork wait for the trainer's approval.

The kernel blocks a fork until the owner of the listener answers, so that a fork bomb grows no faster than it is
observed, however busy the machine is. Without kernel support (before Linux 5.19), or if a container already uses the
single listener, forks are not held and bombs are killed once they are noticed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from typing import Any

from toolwise.sandbox.layers import seccomp, syscalls
from toolwise.sandbox.layers.kernel import libc, raise_errno, send_descriptors, set_no_new_privs

RET_USER_NOTIF = 0x7FC00000
"""SECCOMP_RET_USER_NOTIF: a refusal by another filter takes precedence."""
SET_FILTER, NEW_LISTENER, WAIT_KILLABLE = 1, 8, 32
"""WAIT_KILLABLE (Linux 5.19): once a fork has been received, a signal does not make it fail. Before that, a signal can,
if its handler was installed without SA_RESTART."""
RECEIVE, SEND = 0xC0502100, 0xC0182101
NOTIF_SIZE, NOTIF_RESPONSE_FORMAT = 80, "=QqiI"
NOTIF_FLAG_CONTINUE = 1


def assemble_fork_filter(machine: str) -> list[seccomp.Instruction]:
    """Notify on new processes; allow threads and everything else. The main filter handles other architectures."""
    arch, column = syscalls.PROCESSORS[machine]
    notify, allow = (seccomp.RETURN, 0, 0, RET_USER_NOTIF), seccomp.RETURN_ALLOW
    program: list[seccomp.Instruction] = [
        (seccomp.LOAD, 0, 0, seccomp.ARCH),
        (seccomp.JUMP_EQUAL, 1, 0, arch),
        allow,
        (seccomp.LOAD, 0, 0, seccomp.NR),
    ]
    for name in ("fork", "vfork"):
        number = syscalls.PROCESSES[name][column]
        if number is not None:
            program += [(seccomp.JUMP_EQUAL, 0, 1, number), notify]
    clone = syscalls.ARGUMENT_CHECKED["clone"][column]
    assert clone is not None
    flags = (seccomp.LOAD, 0, 0, seccomp.ARGUMENTS)
    program += [(seccomp.JUMP_EQUAL, 0, 3, clone), flags, (seccomp.JUMP_SET, 1, 0, seccomp.CLONE_THREAD), notify]
    # A filter cannot see the flags of clone3: fail with ENOSYS, so that callers fall back to clone.
    clone3 = syscalls.ARGUMENT_CHECKED["clone3"][column]
    assert clone3 is not None
    return [*program, (seccomp.LOAD, 0, 0, seccomp.NR), (seccomp.JUMP_EQUAL, 0, 1, clone3), seccomp.ENOSYS, allow]


def require_fork_approval(channel: int) -> None:
    """Install the filter in this process, before the main one, and send the listener through `channel`."""
    try:
        set_no_new_privs()
        listener = _install()
    except OSError:
        os.close(channel)  # end of file tells the trainer that forks are not held
        return
    try:
        send_descriptors(channel, b"x", [listener])
    finally:
        os.close(channel)
        os.close(listener)


def _install() -> int:
    if not seccomp.supported():
        raise OSError(errno.ENOSYS, "there is no filter for this CPU architecture")
    number = syscalls.SECCOMP[syscalls.PROCESSORS[platform.machine()][1]]
    _code, program = seccomp.compile_filter(assemble_fork_filter(platform.machine()))
    listener = int(libc().syscall(number, SET_FILTER, NEW_LISTENER | WAIT_KILLABLE, ctypes.byref(program)))
    if listener < 0:
        raise_errno("seccomp")
    return listener


def allow_fork(listener: int) -> None:
    """Let the waiting fork continue, if there still is one.

    Call only when the listener is ready. Holds the GIL: getting it back from a busy thread takes longer than a fork.
    """
    notification = ctypes.create_string_buffer(NOTIF_SIZE)
    if _ioctl(listener, RECEIVE, notification):
        answer = struct.pack(
            NOTIF_RESPONSE_FORMAT, *struct.unpack_from("=Q", notification.raw), 0, 0, NOTIF_FLAG_CONTINUE
        )
        while not _ioctl(listener, SEND, ctypes.create_string_buffer(answer, len(answer))):
            if ctypes.get_errno() != errno.EINTR:
                return


def _ioctl(listener: int, request: int, data: Any) -> bool:
    """False if the waiting process was killed, or if a signal interrupted us and the call can be repeated."""
    done = int(_libc_holding_gil().ioctl(listener, ctypes.c_ulong(request), data)) == 0
    if not done and ctypes.get_errno() not in (errno.ENOENT, errno.EINTR):
        raise_errno("seccomp listener")
    return done


@functools.cache
def _libc_holding_gil() -> ctypes.PyDLL:
    return ctypes.PyDLL(None, use_errno=True)
