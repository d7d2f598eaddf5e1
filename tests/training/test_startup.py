"""Startup time (the only timed tests, and checks that keep them honest), and startup messages."""

from __future__ import annotations

import io
import logging
import os
import statistics
import subprocess
import sys

import pytest

from toolwise.training.startup import announce, show_startup

HEAVY = {"torch", "transformers", "numpy", "pyarrow", "matplotlib"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
REPEATS = 3


def seconds(*arguments: str) -> float:
    """The median of the processor time of some runs: what a busy machine adds to the clock is not ours."""
    taken = []
    for _ in range(REPEATS):
        child = subprocess.Popen([sys.executable, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        taken.append(used.ru_utime + used.ru_stime)
    return statistics.median(taken)


@pytest.fixture(scope="module")
def bare() -> float:
    return seconds("-c", "pass")


def test_the_package_is_imported_at_once(bare: float) -> None:
    assert seconds("-c", "import toolwise") - bare <= 0.3


def test_help_comes_at_once(bare: float) -> None:
    assert seconds("-m", "toolwise", "--help") - bare <= 0.6


@pytest.mark.parametrize(
    "code",
    [
        "import toolwise",
        "import toolwise; toolwise.RunConfig(), toolwise.Task, toolwise.reward_function, toolwise.tool, toolwise.train",
        "import sys; sys.argv = ['toolwise', '--help']; from toolwise.cli import main; main()",
        "import sys; sys.argv = ['toolwise', 'train', '--help']; from toolwise.cli import main; main()",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    told = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    ended = subprocess.run([sys.executable, "-c", told + code], env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "toolwise" in ended.stderr.split()
    assert HEAVY & set(ended.stderr.split()) == set()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_announcements_are_plain_lines_in_a_log() -> None:
    log = io.StringIO()
    with show_startup(log):
        announce("loading the model [small]")
        assert log.getvalue() == "loading the model [small] …\n"
    announce("too late")
    assert "too late" not in log.getvalue()


def test_announcements_are_one_status_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    with show_startup(screen):
        announce("loading the model [small]")
    text = screen.getvalue()
    assert "loading the model [small] …" in text
    assert "\x1b[2K" in text.rpartition("small")[2]  # the line is erased at the end


def test_announcements_are_silent_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), show_startup(enabled=False):
        announce("loading")
    assert caplog.records == []
