"""Starting a worker process and ending it, with everything that it started, however it tries to stay."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from toolwise.references import WORKER
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.bubblewrap import INIT, Monitor, View, command
from toolwise.sandbox.scratch import remove_beside
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
Running = subprocess.Popen[bytes] | Monitor
T = TypeVar("T")


@dataclass(slots=True)
class Process:
    """A worker as the operating system sees it."""

    popen: Running
    channel: socket.socket
    output: int
    life: int
    scratch: Path
    mark: str
    view: View | None = None
    """What it sees, where it is in namespaces of its own."""
    owner: int = field(default_factory=os.getpid)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def threads(self) -> int | None:
        """How many threads it has, from the kernel and not from itself; None where the kernel does not say."""
        pid = self.popen.first() if isinstance(self.popen, Monitor) else self.pid
        try:
            return len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            return None

    def forget(self) -> None:
        """Lets go of the descriptors without touching the process: it is another's."""
        self.channel.close()
        if isinstance(self.popen, Monitor):
            self.popen.forget()
        for descriptor in (self.output, self.life):
            with suppress(OSError):
                os.close(descriptor)

    def end(self, *, sweep: bool) -> int:
        """Kills it and what it started; removes its folder. Returns how it ended."""
        code = end_tree(self.popen, self.mark, sweep=sweep)
        self.forget()
        remove_beside(self.scratch)  # whoever waits for a result need not wait for a hostile folder's end
        return code


def end_tree(popen: Running, mark: str, *, sweep: bool) -> int:
    """Kills a process and what it started, and waits until they are gone. Returns how it ended."""
    if popen.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(popen.pid, signal.SIGKILL)
    if isinstance(popen, Monitor):
        popen.kill()
    elif sweep:  # before it is waited for: until then its number, and so its session's, is nobody else's
        sweep_leftovers(popen.pid, mark)
    return popen.wait()


class _Spawner:
    """One thread that starts every process: the kernel ends a process with the thread that started it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def run(self, start: Callable[[], T]) -> T:
        if self._pid != os.getpid():  # first use, or after a fork, where neither the thread nor the lock survived
            self._lock, self._pid, self._pool = threading.Lock(), os.getpid(), None
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="toolwise-sandbox-start")
            started = self._pool.submit(start)
        return started.result()


_spawner = _Spawner()


def start_process(scratch: Path, view: View | None = None) -> Process:
    """A worker, in namespaces of its own where there is a `view`."""
    return _spawner.run(lambda: _start(scratch, view))


def launch(
    words: list[str], environment: Mapping[str, str], folder: Path, *, view: View | None, **popen: Any
) -> Running:
    """Starts a program, from the one thread that starts all; `pass_fds` and the like are Popen's."""
    return _spawner.run(lambda: _launch(words, environment, folder, view, **popen))


def _launch(words: list[str], environment: Mapping[str, str], folder: Path, view: View | None, **popen: Any) -> Running:
    settings: dict[str, Any] = {"env": environment, "cwd": folder, "start_new_session": True, **popen}
    if view is None:
        return subprocess.Popen(words, **settings)
    info, theirs = os.pipe()
    settings["pass_fds"] = (*settings.get("pass_fds", ()), theirs)
    try:
        started = subprocess.Popen([*command(view, theirs), *words], **settings)
    except BaseException:
        os.close(info)
        raise
    finally:
        os.close(theirs)
    try:
        return Monitor(started, info)
    finally:
        os.close(info)


def _start(scratch: Path, view: View | None) -> Process:
    require_interpreter()
    mark = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    life_read, life_write = os.pipe()
    output_read, output_write = os.pipe()
    keep = library_folders()
    start = {
        "channel": theirs.fileno(),
        "life": life_read,
        "parent": os.getpid() if view is None else INIT,
        "path": [*keep, str(own_folder().parent)],
        "keep": keep,
    }
    try:
        popen = _launch(
            [sys.executable, "-I", "-S", "-B", "-c", _BOOT, json.dumps(start)],
            _environment(scratch, mark),
            scratch,
            view,
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
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
    return Process(popen, ours, output_read, life_write, scratch, mark, view)


def program_environment(home: str, temporary: str, mark: str) -> dict[str, str]:
    """A worker's environment for a program, with the same order of sets and the like in every run of it."""
    return {**_environment(Path(home), mark), "TMPDIR": temporary, "PYTHONHASHSEED": "0"}


def require_interpreter() -> None:
    if not sys.executable:
        raise SandboxError("this Python does not know its own program (sys.executable is empty): no sandbox")


def _environment(scratch: Path, mark: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    home = {"HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return {**passed, **home, **_QUIET, WORKER: "1", _MARK: mark}


def sweep_leftovers(session: int, mark: str) -> None:
    """Ends whatever still runs in the worker's session or carries its mark: a daemon inherits its environment."""
    if sys.platform != "linux":
        return
    for _ in range(_SWEEPS):
        found = False
        for pid in members_of(session, mark):
            found = True
            _kill_checked(pid, session, mark)
        if not found:
            return
        time.sleep(0.005)


def members_of(session: int, mark: str, since: int = 0) -> Iterator[int]:
    """The living processes of a session, and those that carry its mark: as they are found, the newest first, so that
    who has seen enough of a bomb need not look through all of it. `since`: nobody is older, in the kernel's ticks."""
    return (pid for pid in _processes() if _belongs(pid, session, mark, since))


def _processes() -> list[int]:
    found = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted((pid for pid in found if pid != os.getpid()), reverse=True)


def _belongs(pid: int, session: int, mark: str, since: int = 0) -> bool:
    try:
        state, sid, birth = _stat(pid)
        if state in (b"Z", b"X") or birth < since:
            return False
        return sid == session or f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ValueError):
        return False


def born(pid: int) -> int:
    """In the kernel's ticks; 0 where it is gone."""
    try:
        return _stat(pid)[2]
    except (OSError, ValueError):
        return 0


def _stat(pid: int) -> tuple[bytes, int, int]:
    """The state of a process, its session and its birth."""
    text = Path(f"/proc/{pid}/stat").read_bytes()
    words = text[text.rindex(b")") + 2 :].split()
    return words[0], int(words[3]), int(words[19])


def _kill_checked(pid: int, session: int, mark: str) -> None:
    """Through a descriptor that stands for this very process: its number may be another's by now."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _belongs(pid, session, mark):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
