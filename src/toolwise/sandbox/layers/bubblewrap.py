"""Runs processes in namespaces with bubblewrap (`bwrap`): what they can see, and whether it works on this machine."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from toolwise.sandbox.layers.descriptors import wait_ready
from toolwise.sandbox.layers.hardening import readable_paths
from toolwise.sandbox.layers.process_info import list_pids, read_proc_stat
from toolwise.sandbox.targets import readable_folders

NAMESPACES = ("user", "pid", "mnt", "ipc", "net")
INIT = 1
"""Pid, inside the namespace, of the process that starts the first program."""
BWRAP_TIMEOUT_S, INIT_EXIT_WAIT_S = 10.0, 5.0
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
    """The help text of the installed bubblewrap, which lists its options."""
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


class BwrapProcess:
    """A bwrap process with the interface of its program's `Popen`."""

    def __init__(self, popen: subprocess.Popen[bytes], info: int) -> None:
        self._popen = popen
        self.init = _read_child(info)
        self._handle = self._open_init()
        self._first: int | None = None

    def _open_init(self) -> int | None:
        """A pidfd of the first process inside: when it dies, the kernel kills all others."""
        if self.init is None:
            return None
        try:
            handle = os.pidfd_open(self.init)
        except OSError:
            return None
        if read_proc_stat(self.init).parent == self._popen.pid:
            return handle
        os.close(handle)  # it is gone and its pid was reused
        return None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """As in `Popen`; bwrap exits with 128 + n if signal n killed the program."""
        code = self._popen.returncode
        return 128 - code if code is not None and code - 128 in set(signal.Signals) else code

    def poll(self) -> int | None:
        self._popen.poll()
        return self.returncode

    def first(self) -> int | None:
        """Pid, outside, of the program started inside: the oldest child of the first process."""
        if self._first is None:
            stats = {pid: read_proc_stat(pid) for pid in list_pids()}
            started = {pid: stat.start_ticks for pid, stat in stats.items() if stat.parent == self.init}
            self._first = min(started, key=started.__getitem__) if started else None
        return self._first

    def proc_folders(self) -> list[str]:
        """The /proc folders of the processes inside, from the /proc of their namespace, which lists no others."""
        inside = f"/proc/{self.init}/root/proc"
        with suppress(OSError):
            return [f"{inside}/{pid}" for pid in list_pids(inside)]
        return []

    def kill(self) -> None:
        """Kill everything inside at once."""
        if self._handle is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until bwrap and everything inside have ended."""
        self._popen.wait()
        self.kill()
        if self._handle is not None:
            wait_ready(self._handle, INIT_EXIT_WAIT_S)
            self.close_fds()
        code = self.returncode
        assert code is not None
        return code

    def close_fds(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _read_child(info: int) -> int | None:
    data, deadline = b"", time.monotonic() + BWRAP_TIMEOUT_S
    while b"}" not in data and time.monotonic() < deadline:
        if not wait_ready(info, 0.1):
            continue
        chunk = os.read(info, 4096)
        if not chunk:
            break
        data += chunk
    try:
        return int(json.loads(data)["child-pid"])
    except (ValueError, KeyError, TypeError):
        return None
