"""Runs processes in namespaces with bubblewrap (`bwrap`): what they can see, and whether it works on this machine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from toolwise.sandbox.layers.hardening import readable_paths
from toolwise.sandbox.targets import readable_folders

NAMESPACES = ("user", "pid", "mnt", "ipc", "net")
INIT = 1
"""Pid, inside the namespace, of the process that starts the first program."""
BWRAP_TIMEOUT_S = 10.0
MAX_SYMLINKS = 40
_PRIVATE = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


@dataclass(frozen=True, slots=True)
class MountView:
    """The file system visible inside."""

    read: tuple[str, ...]
    write: tuple[tuple[str, str], ...]
    """Folders outside, each with its path inside."""
    folder: str
    """The working folder, by its path inside."""
    network: bool = False
    file_mb: int | None = None
    """Size of the tmpfs that replaces each writable folder; None to write to the folder itself."""


def worker_view(
    layers: Collection[str], read: Iterable[str], scratch: str, permissions: Collection[str], file_mb: int | None = None
) -> MountView | None:
    """The view of a worker with these settings; None if namespaces are not requested or not available."""
    network = "network" in permissions
    if "namespaces" not in layers or unavailable_reason(network):
        return None
    return MountView(tuple(readable_paths(read, permissions)), ((scratch, scratch),), scratch, network, file_mb)


@functools.cache
def unavailable_reason(network: bool = False) -> str:
    """Why bubblewrap does not work here; "" if it does. Found by running it: it may be installed and still fail."""
    if sys.platform != "linux":
        return f"this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    view = MountView(tuple(readable_paths(readable_folders(), ())), (), "/", network)
    try:
        completed = subprocess.run(
            [*bwrap_command(view), sys.executable, "-I", "-S", "-c", ""],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={},
            check=False,
            timeout=BWRAP_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"bwrap cannot be run: {fault}"
    error = completed.stderr.decode("utf-8", "replace").split("\n")[0].strip()
    return "" if completed.returncode == 0 else error or f"bwrap exited with status {completed.returncode}"


def bwrap_command(view: MountView, info: int | None = None) -> list[str]:
    """The command prefix for a program that sees `view`. `info`: a descriptor to which bwrap writes the child's pid."""
    network = () if view.network else ("--unshare-net",)
    # Nested namespaces are not needed; older versions of bubblewrap cannot forbid them.
    no_more_namespaces = ("--disable-userns",) if "--disable-userns" in _bwrap_help() else ()
    info_option = () if info is None else ("--info-fd", str(info))
    return [
        *(_bwrap_path(), *_PRIVATE, *network, *no_more_namespaces, *info_option),
        *("--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox"),
        # Remounted read-only: root outside owns /proc/sys inside, even without capabilities.
        *("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--tmpfs", "/tmp"),
        *_mounts((*view.read, sys.executable, os.path.join(sys.prefix, "pyvenv.cfg")), _writable_mounts(view)),
        *(() if any(inside == "/tmp" for _, inside in view.write) else ("--remount-ro", "/tmp")),
        *("--remount-ro", "/", "--chdir", view.folder, "--"),
    ]


def host_namespaces(view: MountView | None) -> tuple[str, ...]:
    """The namespaces of this process that a process with `view` must not share."""
    if view is None:
        return ()
    return tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES if kind != "net" or not view.network)


def _bwrap_path() -> str:
    """The absolute path, since a worker's environment has a different PATH."""
    return shutil.which("bwrap") or "bwrap"


@functools.cache
def _bwrap_help() -> str:
    completed = subprocess.run(
        [_bwrap_path(), "--help"], capture_output=True, text=True, check=False, timeout=BWRAP_TIMEOUT_S
    )
    return completed.stdout + completed.stderr


def _writable_mounts(view: MountView) -> list[tuple[str, tuple[str, ...]]]:
    """Where and how each writable folder is mounted. Older versions of bubblewrap cannot limit the size of a tmpfs."""
    if view.file_mb is None or "--size" not in _bwrap_help():
        return [(inside, ("--bind", outside)) for outside, inside in view.write]
    return [(inside, ("--size", str(view.file_mb << 20), "--perms", "0700", "--tmpfs")) for _, inside in view.write]


def _mounts(read: Iterable[str], write: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Mount each readable path under its real path and recreate all links leading to it: programs use both."""
    links: dict[str, str] = {}
    # Devices come with --dev: a bind mount of one cannot be opened.
    files = [path for path in read if not _inside(path, ("/dev", "/proc"))]
    real = {real_path for path in files if (real_path := _follow(path, links)) is not None}
    bound: list[str] = []
    for real_folder in sorted(real):
        if not _inside(real_folder, bound):
            bound.append(real_folder)
    mounts = [*((real_folder, ("--ro-bind", real_folder)) for real_folder in bound), *write]
    # Nested paths come after their parents, which would otherwise hide them.
    options = [option for path, how in sorted(mounts, key=lambda mount: mount[0]) for option in (*how, path)]
    needed = {link: target for link, target in links.items() if not _inside(os.path.dirname(link), bound)}
    return options + [option for link, target in needed.items() for option in ("--symlink", target, link)]


def _inside(path: str, folders: Iterable[str]) -> bool:
    """Compares real paths, without touching the file system."""
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _follow(path: str, links: dict[str, str]) -> str | None:
    """The real path, or None if it does not exist. Adds the links on the way to `links`."""
    current, ahead, hops = "/", deque(os.path.abspath(path).split("/")), 0
    while ahead:
        part = ahead.popleft()
        step = os.path.normpath(os.path.join(current, part))
        if part in ("", ".", "..") or not os.path.islink(step):
            current = step
            continue
        hops += 1
        if hops > MAX_SYMLINKS:
            return None
        links[step] = target = os.readlink(step)
        current = "/" if target.startswith("/") else current
        ahead.extendleft(reversed(target.split("/")))
    return current if os.path.exists(current) else None
