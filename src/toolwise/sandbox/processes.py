"""Starting a worker process and ending it, with everything that it started, however it tries to stay."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.targets import library_folders, own_folder

_BOOT = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from toolwise.sandbox.child import main; main(start)"
)
_MARK = "TOOLWISE_SANDBOX"
_PASSED_ON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
_QUIET = {
    # Libraries that would start threads of their own: a worker with threads left behind is replaced.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # One heap for all threads: each further one takes 64 MB of address space, which is limited.
    "MALLOC_ARENA_MAX": "1",
    # Looking for plugins takes a fifth of a worker's start.
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
}
_SWEEPS = 40


@dataclass(slots=True)
class Process:
    """A worker as the operating system sees it."""

    popen: subprocess.Popen[bytes]
    channel: socket.socket
    output: int
    life: int
    scratch: Path
    mark: str
    owner: int = field(default_factory=os.getpid)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def threads(self) -> int | None:
        """How many threads it has, from the kernel and not from itself; None where the kernel does not say."""
        try:
            return len(os.listdir(f"/proc/{self.pid}/task"))
        except OSError:
            return None

    def forget(self) -> None:
        """Lets go of the descriptors without touching the process: it is another's."""
        self.channel.close()
        for descriptor in (self.output, self.life):
            with suppress(OSError):
                os.close(descriptor)

    def end(self, *, sweep: bool) -> int:
        """Kills it and what it started; removes its folder. Returns how it ended."""
        if self.popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if sweep:  # before it is waited for: until then its number, and so its session's, is nobody else's
            sweep_leftovers(self.pid, self.mark)
        code = self.popen.wait()
        self.forget()
        remove_folder(self.scratch)
        return code


class _Spawner:
    """One thread that starts every worker: the kernel ends a worker with the thread that started it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def start(self, scratch: Path) -> Process:
        if self._pid != os.getpid():  # first use, or after a fork, where neither the thread nor the lock survived
            self._lock, self._pid, self._pool = threading.Lock(), os.getpid(), None
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="toolwise-sandbox-start")
            started = self._pool.submit(_start, scratch)
        return started.result()


def _start(scratch: Path) -> Process:
    if not sys.executable:
        raise SandboxError("this Python does not know its own program (sys.executable is empty): no sandbox")
    mark = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    life_read, life_write = os.pipe()
    output_read, output_write = os.pipe()
    keep = library_folders()
    start = {
        "channel": theirs.fileno(),
        "life": life_read,
        "parent": os.getpid(),
        "path": [*keep, str(own_folder().parent)],
        "keep": keep,
    }
    try:
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _BOOT, json.dumps(start)],
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            cwd=scratch,
            env=_environment(scratch, mark),
            start_new_session=True,
            pass_fds=(theirs.fileno(), life_read),
        )
    except OSError as fault:
        ours.close()
        os.close(life_write)
        os.close(output_read)
        raise SandboxError(f"no worker process can be started: {fault}") from None
    finally:
        theirs.close()
        os.close(life_read)
        os.close(output_write)
    ours.setblocking(False)
    os.set_blocking(output_read, False)
    return Process(popen, ours, output_read, life_write, scratch, mark)


def _environment(scratch: Path, mark: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    home = {"HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return {**passed, **home, **_QUIET, _MARK: mark}


start_process = _Spawner().start


def sweep_leftovers(session: int, mark: str) -> None:
    """Ends whatever still runs in the worker's session or carries its mark: a daemon inherits its environment."""
    if sys.platform != "linux":
        return
    for _ in range(_SWEEPS):
        found = [pid for pid in _processes() if _belongs(pid, session, mark)]
        if not found:
            return
        for pid in found:
            _kill_checked(pid, session, mark)
        time.sleep(0.005)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _belongs(pid: int, session: int, mark: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        state, _, _, sid = stat[stat.rindex(b")") + 2 :].split()[:4]
        if state in (b"Z", b"X"):
            return False
        return int(sid) == session or f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ValueError):
        return False


def _kill_checked(pid: int, session: int, mark: str) -> None:
    """Through a descriptor that stands for this very process: its number may be another's by now."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _belongs(pid, session, mark):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def remove_folder(folder: Path) -> None:
    """Removes a folder that somebody hostile has filled; links are removed, never followed."""
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():
        subprocess.run(["rm", "-rf", str(folder)], check=False, capture_output=True)  # at any depth
    if folder.exists():  # closed to its owner
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", str(folder)], check=False, capture_output=True)
