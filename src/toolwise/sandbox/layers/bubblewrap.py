"""Namespaces by way of bubblewrap (`bwrap`): what a process started inside can see, and whether it works here."""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolwise.sandbox.layers.hardening import readable_paths
from toolwise.sandbox.targets import readable_folders

NAMESPACES = ("user", "pid", "mnt", "ipc", "net")
INIT = 1
"""The process id, inside, of whoever started the first program there."""
BWRAP_TIMEOUT_S, INIT_EXIT_WAIT_S = 10.0, 5.0
MAX_SYMLINKS = 40
_PRIVATE = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


@dataclass(frozen=True, slots=True)
class MountView:
    """The files that there are inside."""

    read: tuple[str, ...]
    write: tuple[tuple[str, str], ...]
    """Folders, each with the name that it has inside."""
    folder: str
    """The working folder, by its name inside."""
    network: bool = False
    file_mb: int | None = None
    """The size of a file system in memory that stands in for each folder to write to; None to write to the folder."""


def worker_view(
    layers: Collection[str], read: Iterable[str], scratch: str, permissions: Collection[str], file_mb: int | None = None
) -> MountView | None:
    """What a worker with these settings sees; None where it is to be started without namespaces, or must be."""
    network = "network" in permissions
    if "namespaces" not in layers or unavailable_reason(network):
        return None
    return MountView(tuple(readable_paths(read, permissions)), ((scratch, scratch),), scratch, network, file_mb)


@functools.cache
def unavailable_reason(network: bool = False) -> str:
    """Why bubblewrap cannot be used here, found by using it; "" where it can. It may be installed and not work."""
    if sys.platform != "linux":
        return f"this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    view = MountView(tuple(readable_paths(readable_folders(), ())), (), "/", network)
    try:
        ran = subprocess.run(
            [*bwrap_command(view), sys.executable, "-I", "-S", "-c", ""],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={},
            check=False,
            timeout=BWRAP_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"bwrap does not answer: {fault}"
    said = ran.stderr.decode("utf-8", "replace").split("\n")[0].strip()
    return "" if ran.returncode == 0 else said or f"bwrap ended with status {ran.returncode}"


def bwrap_command(view: MountView, info: int | None = None) -> list[str]:
    """How to start a program that sees `view`. `info`: a descriptor on which bwrap says whom it started."""
    network = () if view.network else ("--unshare-net",)
    told = () if info is None else ("--info-fd", str(info))
    return [
        *(_bwrap_path(), *_PRIVATE, *network, *_no_more_namespaces(), *told),
        *("--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox"),
        # The last word on each is read-only: root outside is the owner of /proc/sys inside, powers or not.
        *("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--tmpfs", "/tmp"),
        *_mounts((*view.read, sys.executable, os.path.join(sys.prefix, "pyvenv.cfg")), _writable_mounts(view)),
        *(() if any(inside == "/tmp" for _, inside in view.write) else ("--remount-ro", "/tmp")),
        *("--remount-ro", "/", "--chdir", view.folder, "--"),
    ]


def host_namespaces(view: MountView | None) -> tuple[str, ...]:
    """The namespaces of this process that whoever sees `view` must not be in."""
    if view is None:
        return ()
    return tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES if kind != "net" or not view.network)


def _bwrap_path() -> str:
    """By its whole path: a worker's environment has another PATH."""
    return shutil.which("bwrap") or "bwrap"


@functools.cache
def _bwrap_help() -> str:
    """What this bubblewrap says that it can do."""
    said = subprocess.run(
        [_bwrap_path(), "--help"], capture_output=True, text=True, check=False, timeout=BWRAP_TIMEOUT_S
    )
    return said.stdout + said.stderr


def _no_more_namespaces() -> tuple[str, ...]:
    """Namespaces inside namespaces are nobody's need there; an older bubblewrap cannot forbid them."""
    return ("--disable-userns",) if "--disable-userns" in _bwrap_help() else ()


def _writable_mounts(view: MountView) -> list[tuple[str, tuple[str, ...]]]:
    """Where each folder to write to is mounted, and how. An older bubblewrap cannot limit the size of one in memory."""
    if view.file_mb is None or "--size" not in _bwrap_help():
        return [(inside, ("--bind", outside)) for outside, inside in view.write]
    return [(inside, ("--size", str(view.file_mb << 20), "--perms", "0700", "--tmpfs")) for _, inside in view.write]


def _mounts(read: Iterable[str], write: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Each place to read under its real path, and every link on the way to it: programs are found by both."""
    links: dict[str, str] = {}
    # Devices come with --dev: a bind mount of one cannot be opened.
    files = [place for place in read if not _inside(place, ("/dev", "/proc"))]
    real = {found for place in files if (found := _follow(place, links)) is not None}
    bound: list[str] = []
    for path in sorted(real):
        if not _inside(path, bound):
            bound.append(path)
    mounts = [*((path, ("--ro-bind", path)) for path in bound), *write]
    # Whatever lies in another comes after it, and would be hidden by it otherwise.
    words = [word for at, how in sorted(mounts, key=lambda mount: mount[0]) for word in (*how, at)]
    needed = {at: to for at, to in links.items() if not _inside(os.path.dirname(at), bound)}
    return words + [word for at, to in needed.items() for word in ("--symlink", to, at)]


def _inside(path: str, folders: Iterable[str]) -> bool:
    """Of real paths, which need no looking up."""
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _follow(path: str, links: dict[str, str]) -> str | None:
    """The real path, with the links that lead there put into `links`; None where there is nothing."""
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
    """A bwrap process, spoken to like the `Popen` of the program that it started."""

    def __init__(self, popen: subprocess.Popen[bytes], info: int) -> None:
        self._popen = popen
        self.init = _read_child(info)
        self._handle = self._open_init()
        self._first: int | None = None

    def _open_init(self) -> int | None:
        """A descriptor that stands for the first process inside: the kernel ends all others with it."""
        if self.init is None:
            return None
        try:
            handle = os.pidfd_open(self.init)
        except OSError:
            return None
        if parent_of(self.init) == self._popen.pid:
            return handle
        os.close(handle)  # it is gone, and its number another's
        return None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """As `Popen` has it: bwrap says 128 + n where a signal n ended the program."""
        code = self._popen.returncode
        return 128 - code if code is not None and code - 128 in set(signal.Signals) else code

    def poll(self) -> int | None:
        self._popen.poll()
        return self.returncode

    def first(self) -> int | None:
        """The program that was started inside, by its number here: the oldest child of the first process."""
        if self._first is None:
            born = {pid: start for pid, parent, start in _all_processes() if parent == self.init}
            self._first = min(born, key=born.__getitem__) if born else None
        return self._first

    def count(self) -> int:
        """How many processes there are inside; 0 where nobody knows."""
        try:
            return sum(name.isdigit() for name in os.listdir(f"/proc/{self.init}/root/proc"))
        except OSError:
            return 0

    def kill(self) -> None:
        """Ends everything inside at once."""
        if self._handle is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> int:
        """Until bwrap has ended, and with it everything inside."""
        self._popen.wait()
        self.kill()
        if self._handle is not None:
            waiting = select.poll()
            waiting.register(self._handle, select.POLLIN)
            waiting.poll(INIT_EXIT_WAIT_S * 1000)
            self.close_fds()
        code = self.returncode
        assert code is not None
        return code

    def close_fds(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _read_child(info: int) -> int | None:
    said, deadline = b"", time.monotonic() + BWRAP_TIMEOUT_S
    waiting = select.poll()
    waiting.register(info, select.POLLIN)
    while b"}" not in said and time.monotonic() < deadline:
        if not waiting.poll(100):
            continue
        more = os.read(info, 4096)
        if not more:
            break
        said += more
    try:
        return int(json.loads(said)["child-pid"])
    except (ValueError, KeyError, TypeError):
        return None


def parent_of(pid: int) -> int | None:
    return next((parent for _, parent, _ in _stats([str(pid)])), None)


def _all_processes() -> list[tuple[int, int, int]]:
    return _stats(name for name in os.listdir("/proc") if name.isdigit())


def _stats(names: Iterable[str]) -> list[tuple[int, int, int]]:
    """The number, the parent and the time of birth of each process that is still there."""
    found = []
    for name in names:
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{name}/stat").read_bytes()
            words = stat[stat.rindex(b")") + 2 :].split()
            found.append((int(name), int(words[1]), int(words[19])))
    return found
