"""What model-written programs try, one case a line: run as whoever runs the tests, and as nobody."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from abuse_disk import alone_on_the_disk
from abuse_program_files import PROGRAM_FILES

from toolwise.sandbox.programs.program_sandbox import ProgramSandbox
from toolwise.sandbox.programs.work_folders import WorkFolder

TIMEOUT_S = 1.0
GRACE_S = 1.0
SECRET = "xyzzy-7431"


@dataclass(frozen=True)
class Case:
    """`text` may name {secret} (a file), {victim} (a folder), {port}, {parent} (the trainer's process) and {root} (the
    folder of all folders)."""

    name: str
    language: str
    text: str
    kind: str
    says: str = ""
    tiers: tuple[str, ...] = ("namespaced", "standard")


@dataclass(frozen=True)
class Outcome:
    kind: str
    message: str
    said: str
    seconds: float
    late: bool
    left: list[str]
    disk_mb: float = 0.0
    disk_limit_mb: float = 0.0
    """The most that it had on disk at once, seen from outside, and what it may have had."""


def _python(name: str, text: str, kind: str, says: str = "") -> Case:
    return Case(f"python_{name}", "python", text, kind, says)


def _shell(
    name: str, text: str, kind: str, says: str = "", tiers: tuple[str, ...] = ("namespaced", "standard")
) -> Case:
    return Case(f"shell_{name}", "shell", text, kind, says, tiers)


PYTHON = [
    _python("reads_a_secret", "print(open({secret!r}).read())", "exit denied"),
    _python("reads_users", "print(open('/etc/passwd').read())", "exit denied"),
    _python("reads_the_trainers_environment", "print(open('/proc/{parent}/environ').read())", "exit denied"),
    _python("reads_its_own_memory", "open('/proc/self/mem', 'rb').read(1)", "denied"),
    _python("lists_other_folders", "import os; print(os.listdir({root!r}))", "exit denied"),
    _python("follows_a_link", "import os; os.symlink({secret!r}, 'l'); print(open('l').read())", "exit denied"),
    _python("writes_outside", "open({secret!r} + '.new', 'w').write('x')", "exit denied"),
    _python("removes_a_secret", "import os; os.remove({secret!r})", "exit denied"),
    _python("network", "import socket; socket.create_connection(('127.0.0.1', {port}))", "denied", "network"),
    _python("udp", "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "denied"),
    _python("fork", "import os; os.fork()", "denied", "processes"),
    _python("fork_bomb", "import os\nwhile True: os.fork()", "denied"),
    _python("subprocess", "import subprocess; subprocess.run(['/bin/ls'])", "denied"),
    _python("kills_its_parent", "import os; os.kill(os.getppid(), 9)", "denied"),
    _python("kills_the_trainer", "import os; os.kill({parent}, 9)", "denied"),
    _python("kills_all", "import os; os.kill(-1, 9)", "denied"),
    _python("loops", "while True: pass", "timeout"),
    _python("loops_in_c", "print('begun')\nsum(range(10**12))", "timeout", "begun"),
    _python("sleeps", "import time; time.sleep(1000)", "timeout"),
    _python("ignores_signals", "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass", "timeout"),
    _python("hangs_at_exit", "import atexit, time; atexit.register(time.sleep, 1000)", "timeout"),
    _python("thread_left", "import threading, time; threading.Thread(target=time.sleep, args=[99]).start()", "timeout"),
    _python("memory", "x = bytearray(10**10)", "memory"),
    _python("memory_bit_by_bit", "x = []\nwhile True: x.append(bytearray(10**6))", "memory"),
    _python("output_bomb", "while True: print('x' * 1000)", "too_big", "bytes left out"),
    _python("error_bomb", "import sys\nwhile True: sys.stderr.write('x' * 1000)", "too_big"),
    _python("file_bomb", "open('f', 'wb').write(b'x' * 10**8)", "too_big"),
    _python("many_files", "for i in range(10**6): open(f'f{{i}}', 'w').write('x' * 5000)", "too_big timeout"),
    _python("exit", "import sys; print('a'); sys.exit(3)", "exit", "status 3"),
    _python("crash", "import os; os.abort()", "died", "SIGABRT"),
    _python("kills_itself", "import os; os.kill(os.getpid(), 9)", "died", "SIGKILL"),
    _python("raises", "1/0", "exit", "ZeroDivisionError"),
    _python("syntax", "def f(:", "exit", "SyntaxError"),
    _python("surrogates", "print('\udc80')", "ok"),
    _python("no_name_for_it", "raise type('\\ud800', (Exception,), {{}})('\\ud800')", "exit"),
    _python("patches_the_harness", "import json, os; json.dumps = os.write = None; raise MemoryError", "memory exit"),
    _python("forges_its_layers", "import os\nfor n in range(3, 30):\n try: os.write(n, b'{{\"missing\": 1}}\\n')\n"
            " except OSError: pass\nraise SystemExit(5)", "exit", "status 5"),
    _python("expression", "x = 20\nx + 22", "ok", "42"),
    _python("environment", "import os; print({secret_name!r} in os.environ)", "ok", "False"),
]  # fmt: skip
SHELL = [
    _shell("reads_a_secret", "cat {secret}", "exit"),
    _shell("writes_outside", "echo x > {secret}.new", "exit"),
    _shell("follows_a_link", "ln -s {secret} l; cat l", "exit"),
    _shell("network", "exec 3<>/dev/tcp/127.0.0.1/{port}", "exit"),
    _shell("kills_the_trainer", "kill -9 {parent}", "exit"),
    _shell("kills_its_parent", "kill -9 $PPID; echo alive", "ok", "alive"),
    _shell("kills_all", "trap '' TERM; kill -9 -1; echo alive", "ok died", tiers=("namespaced",)),
    # By its number of processes; by its time where the kernel cannot ask us about births and the machine is busy.
    _shell("fork_bomb", "b() {{ b | b & }}; b; sleep 100", "too_big timeout"),
    _shell("daemon", "(setsid nohup sleep 1000 >/dev/null 2>&1 &); echo done", "ok", "done"),
    _shell("background", "sleep 1000 & echo done", "ok", "done"),
    _shell("daemon_and_sleep", "(setsid sleep 1000 &); sleep 1000", "timeout"),
    _shell("ignores_signals", "trap '' TERM INT HUP; while :; do :; done", "timeout"),
    _shell("output_bomb", "yes", "too_big", "bytes left out"),
    _shell("file_bomb", "for i in 1 2 3 4 5 6 7 8; do head -c 8000000 /dev/zero > f$i; done; sleep 1", "too_big"),
    _shell("kernel_settings", "echo x > /proc/sys/kernel/core_pattern", "exit"),
    _shell("more_namespaces", "unshare -U true", "exit"),
    _shell("exit", "echo a; exit 3", "exit", "status 3"),
    _shell("kills_itself", "kill -9 $$", "died", "SIGKILL"),
    _shell("nul", "echo a\0b", "exit", "NUL"),
    _shell("environment", "env", "ok", "HOME="),
    _shell("sees_its_own_only", "ls /proc | grep -c '^[0-9]'", "ok", tiers=("namespaced",)),
    _shell("scripts", "echo 'echo from a script' > s; chmod +x s; touch s; ./s", "ok", "a script", ("namespaced",)),
]
FILES = [Case(f"{language}_{name}", language, text, kind) for name, language, text, kind in PROGRAM_FILES]
CASES = [*PYTHON, *SHELL, *FILES]
BY_NAME = {case.name: case for case in CASES}
WORDS = ("reads", "writes", "removes", "follows", "lists", "kills", "fork", "network", "daemon", "kernel", "namespaces")
WHERE_PRIVILEGES_MATTER = [*[c for c in (*PYTHON, *SHELL) if any(word in c.name for word in WORDS)], *FILES[::6]]


FILE_MB, SLACK_MB, MEASURED_MB = 32, 8, 160
"""What one folder of a program may hold, what else may be counted as its own, and what it may have where its folders
have to be measured: it writes at full speed until it is looked at."""


class Meter(threading.Thread):
    """The most that a program has on disk at once: in its own file systems, or in the one that holds its folders."""

    def __init__(self, folder: WorkFolder, own_disk: bool) -> None:
        super().__init__(daemon=True)
        self._folder, self._own_disk, self._done = folder, own_disk, threading.Event()
        self._before = used(folder.path)
        self.peak = 0

    def run(self) -> None:
        while not self._done.wait(0.005):
            with suppress(OSError):
                self.peak = max(self.peak, self._inside() if self._own_disk else used(self._folder.path) - self._before)

    def _inside(self) -> int:
        """A process of its own sees its folders as they are for it."""
        found: dict[int, int] = {}
        outside = os.stat(self._folder.path).st_dev
        for pid in descendants_of(os.getpid()):
            temporary = [*self._folder.path.glob("tmp-*")]
            for place in (self._folder.work_path, *temporary, "/sandbox", "/tmp"):
                with suppress(OSError):
                    inside = f"/proc/{pid}/root{place}"
                    device = os.stat(inside).st_dev
                    if device != outside and os.statvfs(inside).f_blocks * 4096 <= FILE_MB << 20:
                        found[device] = used(inside)
        return sum(found.values())

    def stop(self) -> float:
        self._done.set()
        self.join()
        return self.peak / 2**20


def used(place: str | Path) -> int:
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


class Ground:
    """A folder with a secret, a server that nobody may reach, and a sandbox for each language.

    `own_disk` false: as on a machine where programs cannot have file systems of their own.
    """

    def __init__(self, folder: Path, tier: str, *, own_disk: bool = True) -> None:
        self.secret = folder / "secret.txt"
        self.secret.write_text(SECRET)
        self.victim = folder / "victim"
        self.victim.mkdir()
        (self.victim / "closed").write_text(SECRET)
        (self.victim / "closed").chmod(0o400)
        self.victim.chmod(0o500)
        os.environ["TOOLWISE_TEST_SECRET"] = SECRET
        self.server = socket.create_server(("127.0.0.1", 0))
        limits: dict[str, Any] = {"timeout_s": TIMEOUT_S, "memory_mb": 128, "file_mb": FILE_MB, "output_kb": 4}
        self.sandboxes = {
            "python": ProgramSandbox("python", tier, require=True, **limits),  # type: ignore[arg-type]
            "shell": ProgramSandbox("shell", tier, require=True, permissions=["subprocess"], **limits),  # type: ignore[arg-type]
        }

        self.own_disk = own_disk and self.sandboxes["python"].report().own_disk
        if not own_disk:
            for sandbox in self.sandboxes.values():
                sandbox._plan = replace(sandbox._plan, own_disk=False)

    def run(self, case: Case) -> Outcome:
        """Once; or twice, where the first time was slow: this machine may have had other things to do."""
        with nullcontext() if self.own_disk else alone_on_the_disk():
            outcome = self._run(case)
            return self._run(case) if outcome.late or outcome.disk_mb > outcome.disk_limit_mb else outcome

    def _run(self, case: Case) -> Outcome:
        sandbox = self.sandboxes[case.language]
        folder = sandbox.open_folder()
        root = folder.path.parent
        where: dict[str, Any] = {"secret": str(self.secret), "victim": str(self.victim)}
        where |= {"port": self.server.getsockname()[1], "parent": os.getpid()}
        text = case.text.format(**where, root=str(root), secret_name="TOOLWISE_TEST_SECRET")
        meter = Meter(folder, self.own_disk)
        if case in FILES:
            meter.start()
        began = time.monotonic()
        result = asyncio.run(sandbox.run(text, folder))
        took = time.monotonic() - began
        disk_mb = meter.stop() if case in FILES else 0.0
        sizes = {found.st_ino: found.st_blocks for found in (path.lstat() for path in folder.work_path.rglob("*"))}
        kept = sum(sizes.values()) * 512 / 2**20
        left = [f"process {pid}" for pid in processes_of(root)]
        left += [path.name for path in folder.path.iterdir() if path != folder.work_path]
        asyncio.run(sandbox.close_folder(folder))
        left += [str(root)] if root.exists() else []
        left += ["a visitor"] if select.select([self.server], [], [], 0)[0] else []
        left += [] if self._is_whole() else ["files"]
        left += [f"{kept:.0f} MB kept"] if case in FILES and kept > FILE_MB + SLACK_MB else []
        said = f"{result.stdout}\n{result.stderr}\n{result.message}"
        # The start of an interpreter on a busy machine is nobody's fault: what is timed is the program.
        late, limit = result.seconds > TIMEOUT_S + GRACE_S, 2 * FILE_MB + SLACK_MB if self.own_disk else MEASURED_MB
        return Outcome(result.kind, result.message, said, took, late, left, disk_mb, limit)

    def _is_whole(self) -> bool:
        """Whether all that lies outside is as it was."""
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (self.victim, self.victim / "closed")]
        words = [self.secret.read_text(), (self.victim / "closed").read_text()]
        return modes == [0o500, 0o400] and words == [SECRET] * 2 and len(list(self.secret.parent.iterdir())) == 2

    def close(self) -> None:
        self.server.close()
        for sandbox in self.sandboxes.values():
            sandbox.close()


def descendants_of(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, above in parents.items() if above == parent]
    return found[1:]


def processes_of(root: Path) -> list[int]:
    """Processes that have a folder below `root` in their environment, and those of ours in a namespace."""
    here = os.readlink("/proc/self/ns/pid")
    found = []
    for pid in descendants_of(os.getpid()):
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/pid") != here:
                found.append(pid)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if root.name.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
    return found


@contextmanager
def ground_in(folder: Path, tier: str, *, own_disk: bool = True) -> Iterator[Ground]:
    ground = Ground(folder, tier, own_disk=own_disk)
    try:
        yield ground
    finally:
        ground.close()


def main() -> None:
    """As another user: `FOLDER TIER`; a line of JSON a case."""
    tier = sys.argv[2]
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder, ground_in(Path(folder), tier) as ground:
        for case in WHERE_PRIVILEGES_MATTER:
            if tier in case.tiers:
                outcome = asdict(ground.run(case))
                print(json.dumps({"name": case.name, "outcome": outcome, "uid": os.getuid()}), flush=True)


if __name__ == "__main__":
    main()
