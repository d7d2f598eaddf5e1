"""A supervisor as its starter sees it: it exits like its child, after all descendants are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from process_state import is_running

from toolwise.sandbox.layers.supervisor import KEEP_SUPERVISORS_SIGNAL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
SOURCE = """
import os, sys
from toolwise.sandbox.layers.supervisor import supervise
supervise(int(sys.argv[1]), int(sys.argv[2]))
os.execv("/bin/sh", ["sh", "-c", sys.argv[3]])
"""


class Supervisor:
    def __init__(self, text: str) -> None:
        life, self.life = os.pipe()
        self._report, report = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        words = [sys.executable, "-c", SOURCE, str(life), str(report), text]
        self.popen = subprocess.Popen(
            words, pass_fds=(life, report), env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        os.close(life)
        os.close(report)

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def end(self) -> tuple[int, bytes]:
        code = self.popen.wait(20)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        with suppress(OSError):
            os.close(self.life)
        said = os.read(self._report, 100)
        os.close(self._report)
        return code, said


@pytest.mark.parametrize(
    ("text", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -TERM $$", -15), ("kill -ABRT $$", -6)],
)
def test_it_ends_as_its_child_does(text: str, code: int) -> None:
    assert Supervisor(text).end() == (code, b"ended 0")


@pytest.mark.parametrize(
    "end",
    [
        lambda supervisor: None,
        lambda supervisor: os.kill(supervisor.popen.pid, signal.SIGTERM),
        lambda supervisor: os.close(supervisor.life),
    ],
    ids=["by itself", "asked to", "without a trainer"],
)
def test_descendants_end_before_the_supervisor(end: Callable[[Supervisor], None]) -> None:
    by_itself = end.__code__.co_names == ()
    supervisor = Supervisor(f"env -i setsid sleep 300 & echo $!; {'exit 5' if by_itself else 'sleep 300'}")
    pid = supervisor.line()
    end(supervisor)
    code, said = supervisor.end()
    assert not is_running(pid)
    assert (code, said) == (5, b"ended 1") if by_itself else (code == -9 and said.startswith(b"ended "))


def test_leftovers_are_counted_even_in_one_process_group() -> None:
    assert Supervisor("for i in 1 2 3 4 5; do sleep 300 & done; sleep 0.2; exit 0").end() == (0, b"ended 5")


def test_it_ignores_other_signals() -> None:
    supervisor = Supervisor("echo up; sleep 0.5; exit 3")
    supervisor.line()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM):
        os.kill(supervisor.popen.pid, number)
    assert supervisor.end() == (3, b"ended 0")


def test_its_child_ends_with_it() -> None:
    supervisor = Supervisor("echo $$; exec sleep 300")
    pid = supervisor.line()
    os.kill(supervisor.popen.pid, signal.SIGKILL)
    assert supervisor.end() == (-9, b"")
    until = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(pid)


def test_it_closes_the_descriptors_of_its_child() -> None:
    supervisor = Supervisor("exec >&-; sleep 0.5")
    assert supervisor.line() == ""  # an end of file, while both are alive
    assert supervisor.popen.poll() is None
    assert supervisor.end()[0] == 0


def test_orphans_are_reaped_at_once() -> None:
    supervisor = Supervisor("for i in 1 2 3 4 5; do (setsid true &); done; echo up; sleep 1")
    supervisor.line()
    until = time.monotonic() + 5
    while (found := _zombies_of(supervisor.popen.pid)) and time.monotonic() < until:
        time.sleep(0.02)
    assert found == []
    assert supervisor.end() == (0, b"ended 0")


def _zombies_of(parent: int) -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            state, ppid = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            found += [name] if state == "Z" and int(ppid) == parent else []
    return found


@pytest.mark.parametrize(
    ("told", "end", "spared"),
    [
        (True, "exits", True),
        (True, "SIGTERM", True),
        (True, "trainer gone", False),
        (False, "exits", False),
        (False, "SIGTERM", False),
    ],
)
def test_nested_supervisors_are_spared_on_request(told: bool, end: str, spared: bool) -> None:
    """The process name is easily forged: it protects only on request, and not once the trainer is gone."""
    named = "import time; open('/proc/self/comm', 'w').write('toolwise-watch'); print('up', flush=True); time.sleep(99)"
    rename = f'setsid {sys.executable} -S -c "{named}"'
    supervisor = Supervisor(f"{rename} & echo $!; sleep {0.5 if end == 'exits' else 99}; exit 0")
    words = {supervisor.line(), supervisor.line()}
    pid = (words - {"up"}).pop()
    try:
        if told:
            supervisor.popen.send_signal(KEEP_SUPERVISORS_SIGNAL)
        if end == "SIGTERM":
            supervisor.popen.terminate()
        elif end == "trainer gone":
            os.close(supervisor.life)
        supervisor.end()
        assert is_running(pid) == spared
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
