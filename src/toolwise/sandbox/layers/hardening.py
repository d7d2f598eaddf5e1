"""The hardening layers that a worker applies to itself before it loads user code, and which of them succeeded."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from toolwise.sandbox.layers import disk, kernel, landlock, seccomp

Tier = Literal["off", "basic", "standard", "namespaced"]
LAYERS: dict[Tier, tuple[str, ...]] = {
    "off": (),
    "basic": ("limits",),
    "standard": ("limits", "capabilities", "no_new_privs", "landlock", "seccomp"),
    "namespaced": ("namespaces", "limits", "capabilities", "no_new_privs", "landlock", "seccomp"),
}
LAYER_REQUIREMENTS = {
    "namespaces": "bubblewrap 0.6 or newer (apt install bubblewrap) and permission to use user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0, in docker "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined)",
    "limits": "an operating system with setrlimit",
    "capabilities": "Linux",
    "no_new_privs": "Linux 3.5 or newer",
    "landlock": "Linux 5.13 or newer with 'landlock' among its security modules (kernel option lsm=landlock,…)",
    "seccomp": "Linux on x86_64 or aarch64, with CONFIG_SECCOMP_FILTER",
}
SYSTEM_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero")
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/usr/share/ca-certificates")
PROGRAM_FOLDERS = ("/bin", "/usr/bin", "/usr/local/bin", "/etc/alternatives")
MEBIBYTE = 1 << 20
ROOM_FOR_LIBRARIES_MB = 64
"""Address space for library code, which does not count as user memory."""
MAX_DESCRIPTORS = 64
OWN_DISK = "disk"
"""Ends the `limits` entry if the kernel limits disk usage to `file_mb`, so that it need not be measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a worker is to harden itself."""

    layers: tuple[str, ...]
    scratch: str
    read: tuple[str, ...] = ()
    memory_mb: int = 1024
    file_mb: int = 64
    cpu_s: int = 3600
    permissions: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    """Writable folders besides the scratch folder."""
    outside: tuple[str, ...] = ()
    """The trainer's namespaces that it must not share, by kernel name; empty if it was started without namespaces."""
    own_disk: bool = True
    """Whether each writable folder is to be a separate file system of `file_mb`."""

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.scratch, *self.write)

    @property
    def may_have_children(self) -> bool:
        return "subprocess" in self.permissions or "seccomp" not in self.layers or not seccomp.supported()

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        plain: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
        return cls(**plain)


@dataclass(slots=True)
class HardeningResult:
    """Active layers (layer -> how) and missing ones (layer -> why)."""

    layers: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def harden(plan: Plan, after_limits: Callable[[], None] = lambda: None) -> HardeningResult:
    """Apply the layers in order: limits first, the filter last, since it forbids what the others need.

    `after_limits` is called once the folders are mounted, before anything is forbidden.
    """
    steps: dict[str, Callable[[Plan], str]] = {
        "namespaces": _check_namespaces,
        "limits": _set_limits,
        "capabilities": _drop_capabilities,
        "no_new_privs": _set_no_new_privs,
        "landlock": _restrict_files,
        "seccomp": _filter_calls,
    }
    result = HardeningResult()
    for layer in plan.layers:
        try:
            result.layers[layer] = steps[layer](plan)
        except Exception as fault:  # a layer that this machine lacks is reported, not raised
            result.missing[layer] = f"{type(fault).__name__}: {fault}"
            plan = replace(plan, outside=()) if layer == "namespaces" else plan  # the next layers must not rely on it
        if layer == "limits":
            after_limits()
    return result


def _check_namespaces(plan: Plan) -> str:
    """Verify the one layer that is applied from outside."""
    if not plan.outside:
        raise OSError("the worker was started in the trainer's namespaces")
    kinds = [name.partition(":")[0] for name in plan.outside]
    shared = [
        kind for kind, name in zip(kinds, plan.outside, strict=True) if os.readlink(f"/proc/self/ns/{kind}") == name
    ]
    if shared:
        raise OSError(f"the worker shares these namespaces with the trainer: {', '.join(shared)}")
    network = "" if "net" in kinds else "; the network is the host's, as permitted"
    return f"bubblewrap: {', '.join(kinds)}{network}"


def _set_limits(plan: Plan) -> str:
    memory = plan.memory_mb * MEBIBYTE
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, plan.file_mb * MEBIBYTE)
    _lower(resource.RLIMIT_NOFILE, MAX_DESCRIPTORS)
    _lower(resource.RLIMIT_CPU, plan.cpu_s)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            address_space, *_, data, _ = [int(word) * os.sysconf("SC_PAGE_SIZE") for word in file.read().split()]
        _lower(resource.RLIMIT_DATA, data + memory)
        _lower(resource.RLIMIT_AS, address_space + memory + ROOM_FOR_LIBRARIES_MB * MEBIBYTE)
        _lower(resource.RLIMIT_MSGQUEUE, 0)
    return f"memory, file size, descriptors, CPU time, {_limit_disk(plan)}"


def _limit_disk(plan: Plan) -> str:
    """Mount size-limited file systems; in namespaces, bubblewrap has already done so."""
    reason = "" if plan.outside else "not requested"
    if plan.own_disk and not plan.outside:
        reason = disk.limit_folders(plan.folders, plan.file_mb)
    if not reason and all(disk.is_limited(folder, plan.file_mb) for folder in plan.folders):
        return OWN_DISK
    return f"disk by measuring it{f': {reason}' if reason else ''}"


def _lower(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _drop_capabilities(plan: Plan) -> str:
    kernel.drop_capabilities()
    return "none left"


def _set_no_new_privs(plan: Plan) -> str:
    kernel.set_no_new_privs()
    return "set"


def _restrict_files(plan: Plan) -> str:
    subprocess, network = "subprocess" in plan.permissions, "network" in plan.permissions
    read, write = readable_paths(plan.read, plan.permissions), plan.folders
    version = landlock.restrict(read, write, devices=["/dev/null"], network=network, run=subprocess)
    return f"ABI {version}"


def readable_paths(read: Iterable[str], permissions: Collection[str]) -> list[str]:
    """Everything a worker may read: `read`, and what every program needs."""
    programs = PROGRAM_FOLDERS if "subprocess" in permissions else ()
    network = NETWORK_FILES if "network" in permissions else ()
    return [*read, *SYSTEM_FOLDERS, *SYSTEM_FILES, *programs, *network]


def _filter_calls(plan: Plan) -> str:
    if not seccomp.supported():
        raise OSError("there is no filter for this CPU architecture")
    scoped = bool(plan.outside) or ("landlock" in plan.layers and landlock.abi() >= landlock.SCOPES_SINCE)
    # Shell programs need chmod and touch; in a mount namespace these only affect the program's own folders.
    metadata = ("metadata",) if plan.outside and "subprocess" in plan.permissions else ()
    seccomp.install(os.getpid(), (*plan.permissions, *metadata), scoped=scoped)
    return "filter"
