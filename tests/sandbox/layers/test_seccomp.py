"""The filter, run by a small BPF interpreter: what is allowed and what is refused."""

from __future__ import annotations

import errno
import os

import pytest

from toolwise.sandbox.layers import seccomp, syscalls

PID = 4321
MACHINES = ["x86_64", "aarch64"]


def run(program: list[seccomp.Instruction], nr: int, *arguments: int, arch: int) -> int:
    """What the kernel would do with a system call."""
    data = {seccomp.NR: nr, seccomp.ARCH: arch}
    for index, value in enumerate((*arguments, *[0] * (6 - len(arguments)))):
        data[seccomp.ARGUMENTS + 8 * index] = value & 0xFFFFFFFF
        data[seccomp.ARGUMENTS + 8 * index + 4] = value >> 32 & 0xFFFFFFFF
    at, held = 0, 0
    while True:
        code, yes, no, value = program[at]
        at += 1
        if code == seccomp.LOAD:
            held = data[value]
        elif code == 0x54:
            held &= value
        elif code == seccomp.RETURN:
            return value
        else:
            truth = {
                seccomp.JUMP_EQUAL: held == value,
                seccomp.JUMP_SET: bool(held & value),
                seccomp.JUMP_GREATER: held > value,
            }[code]
            at += yes if truth else no


REFUSED = seccomp.REFUSE | errno.EPERM


def call(machine: str, name: str, *arguments: int, permissions: tuple[str, ...] = ()) -> int:
    arch, column = syscalls.PROCESSORS[machine]
    tables = {**syscalls.ALWAYS_REFUSED, **syscalls.NETWORK, **syscalls.PROCESSES, **syscalls.ARGUMENT_CHECKED}
    number = tables[name][column]
    assert number is not None
    return run(seccomp.assemble(machine, PID, permissions), number, *arguments, arch=arch)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("table", [syscalls.ALWAYS_REFUSED, syscalls.NETWORK, syscalls.PROCESSES])
def test_every_call_in_the_tables_is_refused(machine: str, table: syscalls.SyscallNumbers) -> None:
    column = syscalls.PROCESSORS[machine][1]
    names = [name for name, numbers in table.items() if numbers[column] is not None]
    assert {name for name in names if call(machine, name) != REFUSED} == set()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "arguments", "outcome"),
    [
        ("clone", (0x3D0F00,), seccomp.ALLOW),  # a thread, as glibc makes it
        ("clone", (0x1200011,), REFUSED),  # a fork
        ("clone3", (0,), seccomp.REFUSE | errno.ENOSYS),
        ("kill", (PID, 9), seccomp.ALLOW),
        ("kill", (1, 0), REFUSED),
        ("kill", (2**64 - 1, 0), REFUSED),
        ("kill", (0, 0), REFUSED),
        ("tgkill", (PID, PID, 6), seccomp.ALLOW),
        ("tgkill", (1, 1, 6), REFUSED),
        ("clone", (0x3D0B00,), REFUSED),  # a thread with separate descriptors
        ("close_range", (3, 9, 0), seccomp.ALLOW),
        ("close_range", (3, 9, 4), seccomp.ALLOW),
        ("close_range", (3, 9, 2), REFUSED),
        ("mmap", (0, 4096, 3, 0x22, 2**64 - 1), seccomp.ALLOW),
        ("mmap", (0, 4096, 1, 0x01, 3), seccomp.ALLOW),
        ("mmap", (0, 4096, 3, 0x21, 2**64 - 1), REFUSED),
        ("mmap", (0, 4096, 3, 0x4021, 2**64 - 1), REFUSED),
        ("prlimit64", (0, 7), seccomp.ALLOW),
        ("prlimit64", (PID, 7), seccomp.ALLOW),
        ("prlimit64", (1, 7), REFUSED),
        ("prctl", (15, 0), seccomp.ALLOW),
        ("prctl", (1, 0), REFUSED),
        ("fcntl", (3, 4, 0), seccomp.ALLOW),
        ("fcntl", (3, 8, 1), REFUSED),
        ("fcntl", (3, 10, 9), REFUSED),
        ("ioctl", (1, 0x5401), seccomp.ALLOW),
        ("ioctl", (1, 0x5412), REFUSED),
        ("socketpair", (1, 1 | 0o2000000, 0), seccomp.ALLOW),
        ("socketpair", (1, 2, 0), REFUSED),
        ("socketpair", (2, 1, 0), REFUSED),
        ("sendto", (3, 0, 1, 0, 0), seccomp.ALLOW),
        ("sendto", (3, 0, 1, 0, 0x7F00_0000_0000), REFUSED),
        ("sendto", (3, 0, 1, 0, 64), REFUSED),
    ],
)
def test_arguments_decide(machine: str, name: str, arguments: tuple[int, ...], outcome: int) -> None:
    assert call(machine, name, *arguments) == outcome


@pytest.mark.parametrize("machine", MACHINES)
def test_system_calls_of_another_architecture_kill_the_process(machine: str) -> None:
    program = seccomp.assemble(machine, PID)
    assert run(program, 0, arch=0x40000003) == seccomp.KILL
    if machine == "x86_64":
        assert run(program, seccomp.X32 | 1, arch=syscalls.X86_64) == seccomp.KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_newer_system_calls_fail_with_enosys(machine: str) -> None:
    arch, _ = syscalls.PROCESSORS[machine]
    answer = run(seccomp.assemble(machine, PID), syscalls.LAST_KNOWN + 1, arch=arch)
    assert answer == seccomp.REFUSE | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_permissions_open_their_part_and_no_other(machine: str) -> None:
    assert call(machine, "socket", permissions=("network",)) == seccomp.ALLOW
    assert call(machine, "execve", permissions=("network",)) == REFUSED
    assert call(machine, "execve", permissions=("subprocess",)) == seccomp.ALLOW
    assert call(machine, "clone", 0x1200011, permissions=("subprocess",)) == seccomp.ALLOW
    assert call(machine, "socket", permissions=("subprocess",)) == REFUSED
    assert call(machine, "ptrace", permissions=("network", "subprocess")) == REFUSED


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("name", "own"), [("setresuid", os.getuid()), ("setresgid", os.getgid())])
def test_setting_the_current_uid_is_allowed_and_no_other(machine: str, name: str, own: int) -> None:
    same = 2**64 - 1
    assert call(machine, name, same, own, same) == REFUSED
    asked = [(same, own, same), (same, own + 1, same), (own, own, same), (same, own, own), (same, same, same)]
    outcomes = [call(machine, name, *identities, permissions=("subprocess",)) for identities in asked]
    assert outcomes == [seccomp.ALLOW, REFUSED, REFUSED, REFUSED, REFUSED]


@pytest.mark.parametrize("machine", MACHINES)
def test_subprocess_permission_gives_no_power_over_other_processes(machine: str) -> None:
    assert call(machine, "prlimit64", 0, 7, permissions=("subprocess",)) == seccomp.ALLOW
    assert call(machine, "prlimit64", 1, 7, permissions=("subprocess",)) == REFUSED
    assert call(machine, "clone", 0x3D0F00, permissions=("subprocess",)) == seccomp.ALLOW
    assert call(machine, "clone", 0x3D0B00, permissions=("subprocess",)) == REFUSED


def test_signals_are_allowed_only_if_landlock_scopes_them() -> None:
    for scoped, outcome in ((True, seccomp.ALLOW), (False, REFUSED)):
        program = seccomp.assemble("x86_64", PID, ("subprocess",), scoped=scoped)
        assert run(program, 62, 99, 9, arch=syscalls.X86_64) == outcome


def test_reading_and_writing_still_work() -> None:
    program = seccomp.assemble("x86_64", PID)
    assert {run(program, nr, arch=syscalls.X86_64) for nr in (0, 1, 3, 9, 11, 12, 35, 202, 257)} == {seccomp.ALLOW}


def test_the_filter_fits_the_kernel() -> None:
    program = seccomp.assemble("x86_64", PID)
    assert len(program) < 4096
    assert max(max(yes, no) for _, yes, no, _ in program) < 256


@pytest.mark.parametrize("machine", MACHINES)
def test_processes_are_allowed_but_namespaces_are_not(machine: str) -> None:
    new_user, fork = 0x10000000, 17
    assert call(machine, "clone", fork, permissions=("subprocess",)) == seccomp.ALLOW
    assert call(machine, "clone", new_user | fork, permissions=("subprocess",)) == REFUSED
    assert call(machine, "clone3", permissions=("subprocess",)) == seccomp.REFUSE | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_metadata_of_files_is_allowed_alone(machine: str) -> None:
    assert set(syscalls.METADATA) < set(syscalls.ALWAYS_REFUSED)
    assert call(machine, "fchmodat", permissions=("metadata",)) == seccomp.ALLOW
    assert call(machine, "fchmodat") == REFUSED
    assert call(machine, "mount", permissions=("metadata",)) == REFUSED


@pytest.mark.parametrize("machine", MACHINES)
def test_new_processes_need_approval_and_threads_do_not(machine: str) -> None:
    arch, column = syscalls.PROCESSORS[machine]
    program = seccomp.assemble_fork_filter(machine)
    clone = syscalls.ARGUMENT_CHECKED["clone"][column]
    forks = [number for name in ("fork", "vfork") if (number := syscalls.PROCESSES[name][column]) is not None]
    assert clone is not None
    assert {run(program, number, arch=arch) for number in forks} <= {seccomp.RET_USER_NOTIF}
    assert run(program, clone, 0x1200011, arch=arch) == seccomp.RET_USER_NOTIF
    assert run(program, clone, 0x3D0F00, arch=arch) == seccomp.ALLOW  # a thread, as glibc makes it
    assert {run(program, number, arch=arch) for number in (0, 1, 3, 61, 202)} == {seccomp.ALLOW}
    assert run(program, clone, 0x1200011, arch=0x40000003) == seccomp.ALLOW  # the main filter kills it
