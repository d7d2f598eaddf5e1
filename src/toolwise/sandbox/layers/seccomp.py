"""Assembles the seccomp filters of a worker. Refused calls fail with EPERM, so that a traceback shows the caller.

A worker installs the main filter in itself; after that, neither the worker nor root can remove it. A second one makes
each fork wait for the trainer's approval: the kernel blocks a fork until the owner of the listener answers, so that a
fork bomb grows no faster than it is observed, however busy the machine is. Without kernel support (before Linux 5.19),
or if a container already uses the single listener, forks are not held and bombs are killed once they are noticed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Collection, Sequence
from typing import Any

from toolwise.sandbox.layers import syscalls
from toolwise.sandbox.layers.kernel import closing_fd, libc, raise_errno, send_descriptors, set_no_new_privs

LOAD, AND, JUMP_EQUAL, JUMP_SET, JUMP_GREATER, RETURN = 0x20, 0x54, 0x15, 0x45, 0x25, 0x06
NR, ARCH, ARGUMENTS = 0, 4, 16
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
X32 = 0x40000000
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
CLONE_NAMESPACES = 0x7E020000
"""NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET: in a new namespace a process has root capabilities."""
SOCK_KIND = 0xF
UNCHANGED = 0xFFFFFFFF
"""Argument of setresuid and setresgid: leave this id unchanged."""
MAP_SHARED_ANONYMOUS = 0x21
CLOSE_RANGE_UNSHARE = 2
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_REFUSED = (1, 4, 23, 24, 28, 35, 36, 0x59616D61)
"""PDEATHSIG, DUMPABLE, CAPBSET_DROP, SECUREBITS (both ways), MM, CHILD_SUBREAPER, PTRACER."""
FCNTL_REFUSED = (8, 10, 15, 1024, 1026)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: a descriptor can be made to send any signal to any process of the same user.
F_SETLEASE and F_NOTIFY: other processes that open the file would wait or be watched."""
IOCTL_REFUSED = (0x8901, 0x8902, 0x5412, 0x541C)
"""FIOSETOWN and SIOCSPGRP for the same reason; TIOCSTI and TIOCLINUX inject input into terminals."""
RET_USER_NOTIF = 0x7FC00000
"""SECCOMP_RET_USER_NOTIF: a refusal by another filter takes precedence."""
SET_FILTER, NEW_LISTENER, WAIT_KILLABLE = 1, 8, 32
"""WAIT_KILLABLE (Linux 5.19): once a fork has been received, a signal does not make it fail. Before that, a signal can,
if its handler was installed without SA_RESTART."""
RECEIVE, SEND = 0xC0502100, 0xC0182101
NOTIF_SIZE, NOTIF_RESPONSE_FORMAT = 80, "=QqiI"
NOTIF_FLAG_CONTINUE = 1

Instruction = tuple[int, int, int, int]


def supported() -> bool:
    return platform.system() == "Linux" and platform.machine() in syscalls.PROCESSORS


def _argument(index: int, high: bool = False) -> Instruction:
    return (LOAD, 0, 0, ARGUMENTS + 8 * index + (4 if high else 0))


def _return_action(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


EPERM, ENOSYS, RETURN_ALLOW = (
    _return_action(REFUSE | errno.EPERM),
    _return_action(REFUSE | errno.ENOSYS),
    _return_action(ALLOW),
)
UNSUPPORTED = _return_action(REFUSE | errno.EOPNOTSUPP)


def _refuse_values(index: int, values: Collection[int]) -> list[Instruction]:
    tests = [step for value in values for step in ((JUMP_EQUAL, 0, 1, value & 0xFFFFFFFF), EPERM)]
    return [_argument(index), *tests, RETURN_ALLOW]


def _only(index: int, value: int) -> list[Instruction]:
    return [_argument(index), (JUMP_EQUAL, 1, 0, value), EPERM, RETURN_ALLOW]


def _allow_same_identity(identity: int) -> list[Instruction]:
    """Allow setting the current id: `posix_spawn`, as used by make and others, does that and fails without it."""
    same = [step for index in range(3) for step in (_argument(index), (JUMP_EQUAL, 1, 0, UNCHANGED), EPERM)]
    same[4] = (JUMP_EQUAL, 1, 0, identity)
    return [*same, RETURN_ALLOW]


def _argument_filters(pid: int, permissions: Collection[str], scoped: bool) -> dict[str, list[Instruction]]:
    unix, stream = 1, 1
    blocks = {
        "kill": _only(0, pid),
        "tgkill": _only(0, pid),
        # Only for itself: lowering the limits of the trainer (same user) could kill it.
        "prlimit64": [_argument(0), (JUMP_EQUAL, 2, 0, 0), (JUMP_EQUAL, 1, 0, pid), EPERM, RETURN_ALLOW],
        # Any page that stays mapped keeps all of such memory allocated, and the rest is not accounted anywhere.
        "mmap": [
            _argument(3),
            (AND, 0, 0, MAP_SHARED_ANONYMOUS),
            (JUMP_EQUAL, 0, 1, MAP_SHARED_ANONYMOUS),
            EPERM,
            RETURN_ALLOW,
        ],
        # As with clone below: threads must not have separate descriptors, which /proc/PID/fd does not list.
        "close_range": [_argument(2), (JUMP_SET, 0, 1, CLOSE_RANGE_UNSHARE), EPERM, RETURN_ALLOW],
        "prctl": _refuse_values(0, PR_REFUSED),
        "fcntl": _refuse_values(1, FCNTL_REFUSED),
        "ioctl": _refuse_values(1, IOCTL_REFUSED),
        "setresuid": [EPERM],
        "setresgid": [EPERM],
        "fallocate": [UNSUPPORTED],  # allocates gigabytes instantly; callers fall back to writing
    }
    if "subprocess" in permissions:
        if scoped:  # Landlock or a pid namespace limits signals to what the worker has started
            del blocks["kill"], blocks["tgkill"]
        blocks["setresuid"], blocks["setresgid"] = _allow_same_identity(os.getuid()), _allow_same_identity(os.getgid())
        process = [(JUMP_SET, 0, 1, CLONE_NAMESPACES), EPERM, RETURN_ALLOW]
    else:
        process = [EPERM]
    thread = [(JUMP_SET, 1, 0, CLONE_FILES), EPERM, RETURN_ALLOW]
    blocks["clone"] = [_argument(0), (JUMP_SET, 0, len(thread), CLONE_THREAD), *thread, *process]
    blocks["clone3"] = [ENOSYS]  # a filter cannot see its flags; glibc falls back to clone
    if "network" not in permissions:
        # A stream pair reaches nothing but itself, and asyncio needs one; a datagram pair can be redirected.
        blocks["socketpair"] = [
            _argument(0),
            (JUMP_EQUAL, 1, 0, unix),
            EPERM,
            _argument(1),
            (AND, 0, 0, SOCK_KIND),
            (JUMP_EQUAL, 1, 0, stream),
            EPERM,
            RETURN_ALLOW,
        ]
        blocks["sendto"] = [
            _argument(4),
            (JUMP_EQUAL, 1, 0, 0),
            EPERM,
            _argument(4, high=True),
            (JUMP_EQUAL, 1, 0, 0),
            EPERM,
            RETURN_ALLOW,
        ]
    return blocks


def assemble(machine: str, pid: int, permissions: Collection[str] = (), *, scoped: bool = False) -> list[Instruction]:
    """The filter of a worker with this pid. `scoped`: its signals only reach what it started.

    `permissions`: network, subprocess, and metadata (of files), which users cannot request.
    """
    arch, column = syscalls.PROCESSORS[machine]
    program: list[Instruction] = [(LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, arch), _return_action(KILL), (LOAD, 0, 0, NR)]
    if arch == syscalls.X86_64:
        program += [(JUMP_SET, 0, 1, X32), _return_action(KILL)]
    program += [(JUMP_GREATER, 0, 1, syscalls.LAST_KNOWN), ENOSYS]
    for name, block in _argument_filters(pid, permissions, scoped).items():
        number = syscalls.ARGUMENT_CHECKED[name][column]
        if number is not None:
            program += [(JUMP_EQUAL, 0, len(block), number), *block]
    allowed = syscalls.METADATA if "metadata" in permissions else frozenset()
    refused = {name: numbers for name, numbers in syscalls.ALWAYS_REFUSED.items() if name not in allowed}
    if "network" not in permissions:
        refused |= syscalls.NETWORK
    if "subprocess" not in permissions:
        refused |= syscalls.PROCESSES
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            program += [(JUMP_EQUAL, 0, 1, number), EPERM]
    return [*program, RETURN_ALLOW]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def compile_filter(steps: Sequence[Instruction]) -> tuple[ctypes.Array[ctypes.c_char], _Program]:
    """The program as the kernel expects it. Keep the buffer alive until it is installed: the program points to it."""
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    return buffer, _Program(len(steps), ctypes.addressof(buffer))


def install(pid: int, permissions: Collection[str] = (), *, scoped: bool = False) -> None:
    """Install the filter in this process, irrevocably; requires no_new_privs."""
    _buffer, program = compile_filter(assemble(platform.machine(), pid, permissions, scoped=scoped))
    if libc().prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise_errno("seccomp")


def assemble_fork_filter(machine: str) -> list[Instruction]:
    """Notify on new processes; allow threads and everything else. The main filter handles other architectures."""
    arch, column = syscalls.PROCESSORS[machine]
    notify, load_number = _return_action(RET_USER_NOTIF), (LOAD, 0, 0, NR)
    program: list[Instruction] = [(LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, arch), RETURN_ALLOW, load_number]
    for name in ("fork", "vfork"):
        number = syscalls.PROCESSES[name][column]
        if number is not None:
            program += [(JUMP_EQUAL, 0, 1, number), notify]
    clone, clone3 = syscalls.ARGUMENT_CHECKED["clone"][column], syscalls.ARGUMENT_CHECKED["clone3"][column]
    assert clone is not None
    assert clone3 is not None
    program += [(JUMP_EQUAL, 0, 3, clone), _argument(0), (JUMP_SET, 1, 0, CLONE_THREAD), notify]
    # A filter cannot see the flags of clone3: fail with ENOSYS, so that callers fall back to clone.
    return [*program, load_number, (JUMP_EQUAL, 0, 1, clone3), ENOSYS, RETURN_ALLOW]


def require_fork_approval(channel: int) -> None:
    """Install the filter in this process, before the main one, and send the listener through `channel`."""
    with closing_fd(channel):
        try:
            set_no_new_privs()
            listener = _install_listener()
        except OSError:  # end of file tells the trainer that forks are not held
            return
        with closing_fd(listener):
            send_descriptors(channel, b"x", [listener])


def _install_listener() -> int:
    if not supported():
        raise OSError(errno.ENOSYS, "there is no filter for this CPU architecture")
    number = syscalls.SECCOMP[syscalls.PROCESSORS[platform.machine()][1]]
    _code, program = compile_filter(assemble_fork_filter(platform.machine()))
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
