"""What model-written programs try, one case a line: run as whoever runs the tests, and as nobody."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolwise.sandbox.programs.sandbox import ProgramSandbox

TIMEOUT_S = 1.0
GRACE_S = 1.0
SECRET = "xyzzy-7431"


@dataclass(frozen=True)
class Case:
    """`text` may name {secret} (a file), {port}, {parent} (the trainer's process) and {root} (of all folders)."""

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
CASES = [*PYTHON, *SHELL]
BY_NAME = {case.name: case for case in CASES}
WORDS = ("reads", "writes", "removes", "follows", "lists", "kills", "fork", "network", "daemon", "kernel", "namespaces")
WHERE_PRIVILEGES_MATTER = [case for case in CASES if any(word in case.name for word in WORDS)]


class Ground:
    """A folder with a secret, a server that nobody may reach, and a sandbox for each language."""

    def __init__(self, folder: Path, tier: str) -> None:
        self.secret = folder / "secret.txt"
        self.secret.write_text(SECRET)
        os.environ["TOOLWISE_TEST_SECRET"] = SECRET
        self.server = socket.create_server(("127.0.0.1", 0))
        limits: dict[str, Any] = {"timeout_s": TIMEOUT_S, "memory_mb": 128, "file_mb": 32, "output_kb": 4}
        self.sandboxes = {
            "python": ProgramSandbox("python", tier, require=True, **limits),  # type: ignore[arg-type]
            "shell": ProgramSandbox("shell", tier, require=True, permissions=["subprocess"], **limits),  # type: ignore[arg-type]
        }

    def run(self, case: Case) -> Outcome:
        """Once; or twice, where the first time was slow: this machine may have had other things to do."""
        outcome = self._run(case)
        return self._run(case) if outcome.late else outcome

    def _run(self, case: Case) -> Outcome:
        sandbox = self.sandboxes[case.language]
        folder = sandbox.open_folder()
        root = folder.path.parent
        where = {"secret": str(self.secret), "port": self.server.getsockname()[1], "parent": os.getpid()}
        text = case.text.format(**where, root=str(root), secret_name="TOOLWISE_TEST_SECRET")
        began = time.monotonic()
        result = asyncio.run(sandbox.run(text, folder))
        took = time.monotonic() - began
        left = [f"process {pid}" for pid in processes_of(root)]
        left += [path.name for path in folder.path.iterdir() if path != folder.files]
        asyncio.run(sandbox.close_folder(folder))
        left += [str(root)] if root.exists() else []
        left += ["a visitor"] if select.select([self.server], [], [], 0)[0] else []
        left += [] if self.secret.read_text() == SECRET and len(list(self.secret.parent.iterdir())) == 1 else ["files"]
        said = f"{result.stdout}\n{result.stderr}\n{result.message}"
        # The start of an interpreter on a busy machine is nobody's fault: what is timed is the program.
        return Outcome(result.kind, result.message, said, took, result.seconds > TIMEOUT_S + GRACE_S, left)

    def close(self) -> None:
        self.server.close()
        for sandbox in self.sandboxes.values():
            sandbox.close()


def processes_of(root: Path) -> list[int]:
    """Processes that have a folder below `root` mounted, or in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            for file in ("environ", "mountinfo"):
                with suppress(OSError):
                    if root.name.encode() in Path(f"/proc/{name}/{file}").read_bytes():
                        found.append(int(name))
                        break
    return found


@contextmanager
def ground_in(folder: Path, tier: str) -> Iterator[Ground]:
    ground = Ground(folder, tier)
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
