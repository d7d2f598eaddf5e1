"""How long it takes until something happens: the only timed tests, and what keeps them honest."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numpy", "pyarrow", "matplotlib"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
REPEATS = 5


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
