"""Tries, inside a hardened worker, what it must not be able to do."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable

from toolwise.sandbox.layers import kernel
from toolwise.sandbox.layers.bubblewrap import INIT
from toolwise.sandbox.layers.hardening import MEBIBYTE, Plan


def probe_layers(plan: Plan) -> dict[str, str]:
    """Layer -> "" if it holds, else what got through."""
    probes: dict[str, Callable[[Plan], str]] = {
        "namespaces": _probe_namespaces,
        "limits": _probe_limits,
        "capabilities": lambda _: "root capabilities are still in effect" if kernel.capabilities() else "",
        "no_new_privs": lambda _: "" if kernel.has_no_new_privs() else "a set-uid program could still raise privileges",
        "landlock": _probe_landlock,
        "seccomp": _probe_seccomp,
    }
    return {layer: probes[layer](plan) for layer in plan.layers}


def _probe_namespaces(plan: Plan) -> str:
    if os.path.lexists(os.path.join(os.path.dirname(plan.scratch), ".lock")):
        return "the parent of the scratch folder was visible"
    return "" if os.getppid() == INIT else "processes outside were visible"


def _probe_limits(plan: Plan) -> str:
    try:
        bytearray((plan.memory_mb + 256) * MEBIBYTE)
    except (MemoryError, OSError):
        return ""
    if sys.platform == "darwin":
        return "memory is not limited"
    return "more memory than memory_mb could be allocated"


def _probe_landlock(plan: Plan) -> str:
    for path in ("/etc/passwd", "/proc/self/environ"):
        if not _refused(plan, lambda path=path: open(path, "rb").close()):  # type: ignore[misc]
            return f"{path} could be read"
    beside = os.path.join(os.path.dirname(plan.scratch), "probe")
    if not _refused(plan, lambda: open(beside, "wb").close()):
        return "a file beside the scratch folder could be written"
    try:
        with open(os.path.join(plan.scratch, "probe"), "wb") as file:
            file.write(b"x")
    except OSError as fault:
        return f"the scratch folder cannot be written: {fault}"
    return ""


def _probe_seccomp(plan: Plan) -> str:
    if "network" not in plan.permissions and not _refused(plan, lambda: socket.socket(socket.AF_INET).close()):
        return "a socket could be opened"
    if "subprocess" not in plan.permissions:
        if not _refused(plan, lambda: subprocess.run(["/bin/true"], check=False)):
            return "a process could be started"
        if not _refused(plan, lambda: _fork()):
            return "a fork went through"
    with mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE):  # this must still work
        pass
    return ""


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def _refused(plan: Plan, attempt: Callable[[], object]) -> bool:
    absent = (errno.EROFS, errno.ENOENT) if plan.outside else ()  # in a mount namespace most files do not exist
    try:
        attempt()
    except OSError as fault:
        return fault.errno in (errno.EPERM, errno.EACCES, *absent)
    return False
