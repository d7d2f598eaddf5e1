"""What rewards, tools and programs do to leave processes behind, one case each, and who must be alive afterwards: nobody.
Run by test_abuse_processes.py, and as a program by a user without privileges: `python abuse_processes.py FOLDER TIER`
prints one line of JSON a case."""
# ruff: noqa: E501 (a case is a line of hostile code)

from __future__ import annotations

import itertools
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S, GRACE_S = 2.0, 4.0
MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
HEAD = """
import ctypes, os, resource, signal, subprocess, sys, threading, time

libc = ctypes.CDLL(None, use_errno=True)
CLONE, CLONE3, PTRACE, X86 = ((56, 435, 101, True) if os.uname().machine == 'x86_64' else (220, 435, 117, False))
CLONE_PARENT, CLONE_VFORK = 0x8000, 0x4000

def system(*arguments):
    answer = libc.syscall(*map(ctypes.c_long, arguments))
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer

def prctl(*arguments):
    libc.prctl(*map(ctypes.c_ulong, arguments))

def sleep(name, env=None, argv0='sleep'):
    os.execve('/bin/sleep', [argv0, name], os.environ if env is None else env)

def daemon(name, *steps, env=None, argv0='sleep'):
    '''A grandchild in a session of its own, which does some more before it sleeps.'''
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                for step in steps: step()
                sleep(name, env, argv0)
        finally:
            os._exit(1)
    os.waitpid(child, 0)

def sh(text, name):
    subprocess.run(['/bin/sh', '-c', text.replace('NAME', name)])
"""


@dataclass(frozen=True)
class Case:
    """`body` is the body of attack(name), which leaves behind processes that have `name` in their command line, or
    their folder. `kind` is one or several, "ok" for none; `tiers` where it makes sense."""

    name: str
    body: str
    kind: str = "ok"
    module: str = ""
    tiers: tuple[str, ...] = ("basic", "standard", "namespaced")
    long: bool = False
    left: int = 1
    """How many must have been counted, at least, where the call itself ended well."""

    def source(self) -> str:
        body = textwrap.indent(textwrap.dedent(self.body).strip("\n"), "    ")
        module = textwrap.dedent(self.module)
        return (
            f"{HEAD}\n{module}\ndef attack(name):\n{body}\ndef f(messages, name):\n    attack(name)\n    return 1.0\n"
        )


BASIC = ("basic",)
DAEMONS = [
    Case("env_i_setsid", "sh('env -i setsid sleep NAME &', name)"),
    Case("double_fork", "daemon(name)"),
    Case("fork_only", "if os.fork() == 0: sleep(name)"),
    Case("setsid_then_fork", "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: sleep(name)\n    os._exit(0)"),
    Case("nohup", "sh('nohup sleep NAME > /dev/null 2>&1 &', name)"),
    Case("start_new_session", "subprocess.Popen(['/bin/sleep', name], start_new_session=True)"),
    Case("own_group", "if os.fork() == 0:\n    os.setpgid(0, 0)\n    sleep(name)"),
    Case("no_pdeathsig", "daemon(name, lambda: prctl(1, 0, 0, 0, 0))"),
    Case("no_descriptors", "daemon(name, lambda: os.closerange(0, 4096))"),
    Case("no_environment", "daemon(name, env={})"),
    Case("no_folder", "daemon(name, lambda: os.chdir('/'), env={})"),
    Case("another_comm", "if os.fork() == 0:\n    os.setsid()\n    prctl(15, ctypes.addressof(ctypes.create_string_buffer(b'kworker/0:1')), 0, 0, 0)\n    os.environ.clear(); time.sleep(300)"),
    Case("supervisors_comm", "if os.fork() == 0:\n    os.setsid()\n    prctl(15, ctypes.addressof(ctypes.create_string_buffer(b'toolwise-watch')), 0, 0, 0)\n    time.sleep(300)"),
    Case("another_command_line", "daemon(name, env={}, argv0='[kworker/0:1]')"),
    Case("posix_spawn", "os.posix_spawn('/bin/sleep', ['sleep', name], {}, setsid=True)"),
    Case("vfork", "if system(CLONE, CLONE_VFORK | 17, 0, 0, 0, 0) == 0: os.setsid(); sleep(name, {})"),
    Case("clone_parent", "if system(CLONE, CLONE_PARENT | 17, 0, 0, 0, 0) == 0: os.setsid(); sleep(name, {})"),
    Case("clone_parent_twice", "if system(CLONE, CLONE_PARENT | 17, 0, 0, 0, 0) == 0:\n    if system(CLONE, CLONE_PARENT | 17, 0, 0, 0, 0) == 0: os.setsid(); sleep(name, {})\n    os._exit(0)"),
    Case("clone_without_signal", "if system(CLONE, 0, 0, 0, 0, 0) == 0: os.setsid(); sleep(name, {})"),
    Case("clone3_parent", """
        room = (ctypes.c_uint64 * 11)(CLONE_PARENT, 0, 0, 0, 0)
        if system(CLONE3, ctypes.addressof(room), 88) == 0: os.setsid(); sleep(name, {})
        """, "ok exception denied", left=0),
    Case("ignores_signals", "daemon(name, lambda: [signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)])"),
    Case("blocks_signals", "daemon(name, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)))"),
    Case("traps_in_a_shell", "sh('''(trap '' HUP INT TERM; setsid sh -c \"trap '' TERM; sleep NAME & sleep NAME; :\") &''', name)"),
    Case("background_of_background", "sh('((env -i setsid sleep NAME &) &) &', name)"),
    Case("stopped", "daemon(name, lambda: os.kill(os.getpid(), signal.SIGSTOP))", tiers=("basic", "namespaced")),
    Case("stopped_and_orphaned", "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP); time.sleep(300)\n    os._exit(0)\ntime.sleep(0.1)", tiers=("basic", "namespaced")),
    Case("traced", """
        if os.fork() == 0:
            os.setsid()
            child = os.fork()
            if child == 0:
                system(PTRACE, 0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP); sleep(name)
            os.waitpid(child, os.WUNTRACED); sleep(name)
        time.sleep(0.2)
        """, tiers=BASIC),
    Case("a_reaper_between", "if os.fork() == 0:\n    prctl(36, 1, 0, 0, 0)\n    daemon(name); daemon(name)\n    sleep(name, {})\ntime.sleep(0.1)", left=2),
    Case("keeps_zombies", "if os.fork() == 0:\n    os.setsid()\n    for _ in range(5):\n        if os.fork() == 0: os._exit(0)\n    sleep(name)"),
    Case("keeps_the_pipes", "if os.fork() == 0:\n    os.setsid(); time.sleep(300)"),
    Case("prints_for_ever", "sh('setsid yes NAME &', name)"),
    Case("computes_for_ever", "if os.fork() == 0:\n    os.setsid()\n    while True: pass"),
    Case("on_import", "pass", module="subprocess.Popen(['env', '-i', 'setsid', 'sleep', os.getcwd()[1:] and '301'], start_new_session=True)"),
    Case("multiprocessing", "import multiprocessing as m\np = m.get_context('fork').Process(target=time.sleep, args=(300,), daemon=True); p.start()"),
    Case("crowd", "for _ in range(30): subprocess.Popen(['setsid', 'sleep', name], env={})\ntime.sleep(0.2)", left=20),
    Case("deep_chain", "for _ in range(25):\n    if os.fork() == 0: os.setsid(); continue\n    break\nif os.getpid() != ME: time.sleep(300)\ntime.sleep(0.5)", module="ME = os.getpid()", left=20),
    Case("hops", """
        if os.fork() == 0:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                if os.fork(): os._exit(0)
        """, left=0),
    Case("hops_between_sessions", """
        if os.fork() == 0:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                if os.fork(): os._exit(0)
                os.setsid()
        """, left=0),
    Case("respawns", """
        if os.fork() == 0:
            end = time.monotonic() + 20
            while time.monotonic() < end:  # whoever is killed is started again by the other
                other = os.fork()
                if other: os.waitpid(other, 0)
                else: os.setsid()
                time.sleep(0.05)
        time.sleep(0.3)
        """),
    Case("bomb", """
        if os.fork() == 0:
            end = time.monotonic() + 3
            while time.monotonic() < end and len(os.listdir('/proc')) < 600:
                if os.fork() == 0: os.setsid()
            time.sleep(300)
        time.sleep(0.3)
        """, "ok too_big memory", tiers=BASIC, long=True, left=10),
    Case("while_it_loops", "daemon(name, env={})\nwhile True: pass", "timeout"),
    Case("and_exits", "daemon(name, env={}); os._exit(0)", "died"),
    Case("and_dies", "daemon(name, env={}); os.kill(os.getpid(), 9)", "died"),
    Case("and_crashes", "daemon(name, env={}); ctypes.string_at(0)", "died"),
    Case("and_raises", "daemon(name, env={}); raise ValueError", "exception"),
    Case("and_closes_its_channel", "daemon(name, env={}); os.closerange(3, 4096); time.sleep(300)", "died"),
    Case("thread_forks_later", "def later():\n    time.sleep(0.05); daemon(name)\nthreading.Thread(target=later).start()", left=0),
    Case("asks_the_supervisor_to_end", "daemon(name, env={}); os.kill(os.getppid(), 15); time.sleep(300)", "died", tiers=BASIC),
    Case("stops_the_supervisor", "daemon(name, env={}); os.kill(os.getppid(), 19)", tiers=BASIC),
    Case("kills_the_supervisor", "daemon(name); os.kill(os.getppid(), 9); time.sleep(300)", "died", tiers=BASIC),
    Case("process_namespace", "sh('unshare -Urfp sh -c \"sleep NAME & sleep NAME\" &', name); time.sleep(0.2)", tiers=BASIC, left=0),
]  # fmt: skip
BY_NAME = {case.name: case for case in DAEMONS}

SHELL = {
    "env_i_setsid": "env -i setsid sleep NAME &",
    "double_fork": "((env -i setsid sleep NAME &) &) ; echo done",
    "nohup": "nohup sleep NAME >/dev/null 2>&1 & disown; echo done",
    "no_descriptors": "env -i setsid sleep NAME <&- >&- 2>&- &",
    "exec_with_another_name": "(exec -a '[kworker/0:0]' setsid sleep NAME &)",
    "ignores_signals": "(trap '' HUP INT TERM QUIT; setsid sleep NAME) & sleep 0.1",
    "chain": 'sh -c \'sh -c "sh -c \\"setsid sleep NAME & \\" & " &\' & sleep 0.2',
    "crowd": "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do env -i setsid sleep NAME & done",
    "exits_at_once": "env -i setsid sleep NAME & exit 3",
    "kills_itself": "env -i setsid sleep NAME & kill -9 $$",
    "respawns": "r() { while :; do setsid sleep NAME; done; }; r & r & sleep 0.2",
    "loops": "env -i setsid sleep NAME & while :; do :; done",
}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    kind: str
    seconds: float
    alive: list[str]
    counted: int
    next_score: float | None


def new_name() -> str:
    """A number of seconds that nobody else sleeps."""
    return f"3{os.getpid() % 1000:03d}.{next(_numbers):03d}{time.monotonic_ns() % 1_000_000:06d}"


def alive_with(*words: str) -> list[str]:
    """Processes, zombies apart, with one of the words in their command line, their environment or their folder's
    path: whosever children they are now."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        texts = []
        for file in ("cmdline", "environ"):
            with suppress(OSError):
                texts.append(Path(f"/proc/{entry}/{file}").read_bytes())
        with suppress(OSError):
            texts.append(os.readlink(f"/proc/{entry}/cwd").encode())
        with suppress(OSError):
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and any(word.encode() in text for word in words for text in texts):
                found.append(f"{entry} {state} {texts[0][:60]!r}")
    return found


class Ground:
    """A sandbox of one tier that lets rewards start processes."""

    def __init__(self, folder: Path, tier: str) -> None:
        from toolwise.sandbox import Sandbox

        self.folder = folder
        permissions = [] if tier == "basic" else ["subprocess"]
        self.sandbox = Sandbox(
            tier,  # type: ignore[arg-type]
            timeout_s=TIMEOUT_S, memory_mb=256, file_mb=32, workers=1, permissions=permissions,
        )  # fmt: skip
        (folder / "harmless.py").write_text("def f(messages, truth): return 0.25\n")

    def run(self, case: Case) -> Outcome:
        path = self.folder / f"case_{case.name}.py"
        path.write_text(case.source())
        name, pool = new_name(), self.sandbox._pool
        before = pool.left_running
        began = time.monotonic()
        result = self.sandbox.evaluate(f"{path}:f", MESSAGES, name)
        seconds = time.monotonic() - began
        # The folder of each worker lies in `_root`; nothing of those that are gone may be in one of them.
        found = alive_with(name, f"{pool.scratch_root.path}/")
        known = {str(pid) for pid in self.known()}  # afterwards: a spare comes up meanwhile
        alive = [line for line in found if line.split()[0] not in known]
        next_score = self.sandbox.evaluate(f"{self.folder / 'harmless.py'}:f", MESSAGES, None).score
        kind = result.error.kind if result.error else "ok"
        return Outcome(kind, seconds, alive, pool.left_running - before, next_score)

    def known(self) -> set[int]:
        """Workers that wait and the spare, each with its supervisor."""
        pool = self.sandbox._pool
        up = [worker.process for idle in pool._idle.values() for worker in idle]
        known = {pid for process in up for pid in (process.popen.pid, process.worker)}
        known |= {getattr(process.popen, "init", 0) for process in up}  # bwrap's
        if pool._spare is not None:
            spare = {pool._spare.popen.pid}
            for _ in range(2):  # bwrap has one in between
                spare |= {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) in spare}
            known |= spare
        return known


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@contextmanager
def ground_in(folder: Path, tier: str) -> Iterator[Ground]:
    ground = Ground(folder, tier)
    try:
        yield ground
    finally:
        ground.sandbox.close()


def wrong_with(case: Case, outcome: Any) -> str:
    """What is not as it must be; "" where all is."""
    if outcome["kind"] not in case.kind.split():
        return f"kind {outcome['kind']}"
    if outcome["alive"]:
        return f"alive: {outcome['alive']}"
    if outcome["next_score"] != 0.25:
        return f"the next call gave {outcome['next_score']}"
    if outcome["seconds"] > TIMEOUT_S + GRACE_S:
        return f"{outcome['seconds']:.1f} s"
    if outcome["kind"] == "ok" and outcome["counted"] < case.left:
        return f"{outcome['counted']} were counted of {case.left}"
    return ""


def main() -> None:
    tier = sys.argv[2]
    with ground_in(Path(sys.argv[1]), tier) as ground:
        report: Any = ground.sandbox.report()
        if not report.complete:
            print(json.dumps({"missing": str(report)}))
            return
        for case in DAEMONS:
            if tier in case.tiers:
                outcome = asdict(ground.run(case))
                print(json.dumps({"name": case.name, "outcome": outcome, "uid": os.getuid()}), flush=True)


if __name__ == "__main__":
    main()
