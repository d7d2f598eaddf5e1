"""Births asked for one by one: a process that may have children must have each of them allowed by the trainer.

The kernel holds a fork until whoever has the listener answers, so that a bomb grows no faster than it is looked at,
however busy the machine is. Where the kernel has no such thing (before Linux 5.19), or a container has taken its one
place, births are free and bombs are ended when they are seen.
"""

from __future__ import annotations

import _socket
import array
import ctypes
import errno
import functools
import os
import platform
import struct
from typing import Any

from toolwise.sandbox.layers import seccomp, syscalls
from toolwise.sandbox.layers.kernel import libc, raise_errno, set_no_new_privs

RET_USER_NOTIF = 0x7FC00000
"""SECCOMP_RET_USER_NOTIF: refusals of another filter come first."""
SET_FILTER, NEW_LISTENER, WAIT_KILLABLE = 1, 8, 32
"""The last, since Linux 5.19: once a birth is heard of, a signal does not make it fail. Until then one can, where its
handler does not have calls started again."""
RECEIVE, SEND = 0xC0502100, 0xC0182101
NOTIF_SIZE, NOTIF_RESPONSE_FORMAT = 80, "=QqiI"
NOTIF_FLAG_CONTINUE = 1


def assemble_fork_filter(machine: str) -> list[seccomp.Instruction]:
    """Asks for new processes; lets threads and all else through. Of another processor's calls the other filter says."""
    arch, column = syscalls.PROCESSORS[machine]
    ask, fine = (seccomp.RETURN, 0, 0, RET_USER_NOTIF), seccomp.RETURN_ALLOW
    program: list[seccomp.Instruction] = [
        (seccomp.LOAD, 0, 0, seccomp.ARCH),
        (seccomp.JUMP_EQUAL, 1, 0, arch),
        fine,
        (seccomp.LOAD, 0, 0, seccomp.NR),
    ]
    for name in ("fork", "vfork"):
        number = syscalls.PROCESSES[name][column]
        if number is not None:
            program += [(seccomp.JUMP_EQUAL, 0, 1, number), ask]
    clone = syscalls.ARGUMENT_CHECKED["clone"][column]
    assert clone is not None
    flags = (seccomp.LOAD, 0, 0, seccomp.ARGUMENTS)
    program += [(seccomp.JUMP_EQUAL, 0, 3, clone), flags, (seccomp.JUMP_SET, 1, 0, seccomp.CLONE_THREAD), ask]
    # Its flags lie where a filter cannot see them: as if there were none, and clone is used instead.
    clone3 = syscalls.ARGUMENT_CHECKED["clone3"][column]
    assert clone3 is not None
    return [*program, (seccomp.LOAD, 0, 0, seccomp.NR), (seccomp.JUMP_EQUAL, 0, 1, clone3), seccomp.ENOSYS, fine]


def require_fork_approval(channel: int) -> None:
    """In the process itself, before its other filter: from here on `channel`'s other end answers for it."""
    try:
        set_no_new_privs()
        listener = _install()
    except OSError:
        os.close(channel)  # the other end reads that nobody will ask
        return
    way = _socket.socket(fileno=channel)  # the module under `socket`, which every program would wait for
    try:
        way.sendmsg([b"x"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [listener]))])
    finally:
        way.close()
        os.close(listener)


def _install() -> int:
    if not seccomp.supported():
        raise OSError(errno.ENOSYS, "no filter is written for this processor")
    number = syscalls.SECCOMP[syscalls.PROCESSORS[platform.machine()][1]]
    _code, program = seccomp.compile_filter(assemble_fork_filter(platform.machine()))
    listener = int(libc().syscall(number, SET_FILTER, NEW_LISTENER | WAIT_KILLABLE, ctypes.byref(program)))
    if listener < 0:
        raise_errno("seccomp")
    return listener


def allow_fork(listener: int) -> None:
    """Answers the one who waits, where there still is one. Only when the listener is ready, and so without letting go
    of the interpreter: to get it back beside a busy thread takes longer than a fork."""
    notice = ctypes.create_string_buffer(NOTIF_SIZE)
    if _ioctl(listener, RECEIVE, notice):
        answer = struct.pack(NOTIF_RESPONSE_FORMAT, *struct.unpack_from("=Q", notice.raw), 0, 0, NOTIF_FLAG_CONTINUE)
        while not _ioctl(listener, SEND, ctypes.create_string_buffer(answer, len(answer))):
            if ctypes.get_errno() != errno.EINTR:
                return


def _ioctl(listener: int, request: int, data: Any) -> bool:
    """False where who waited was killed, or where we were called away and may ask again."""
    done = int(_libc_holding_gil().ioctl(listener, ctypes.c_ulong(request), data)) == 0
    if not done and ctypes.get_errno() not in (errno.ENOENT, errno.EINTR):
        raise_errno("seccomp's listener")
    return done


@functools.cache
def _libc_holding_gil() -> ctypes.PyDLL:
    return ctypes.PyDLL(None, use_errno=True)
