"""Detecting calls that compute, including those that nap in between or compute in a subprocess."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolwise.sandbox.layers.kernel import stat_fields
from toolwise.tools.isolation import core_time
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.core_time import CpuUsage
from toolwise.tools.isolation.tool_pool import ToolPool

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="calls are looked at on Linux")

SLEEP = "import time; print(flush=True); time.sleep(1000)"
SPIN = "print(flush=True)\nwhile True: pass"
NAP_IN_BETWEEN = """
import time
print(flush=True)
while True:
    end = time.process_time() + 0.01
    while time.process_time() < end: pass
    time.sleep(0.003)
"""
SPIN_IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {SPIN!r}])"
SPIN_IN_SHORT_CHILDREN = """
import subprocess, sys
print(flush=True)
while True: subprocess.run([sys.executable, "-S", "-c", "for _ in range(10**6): pass"])
"""
TOOLS = '''
import subprocess, sys, time
def child(n: int) -> str:
    """Computes in a subprocess."""
    code = "import time\\nwhile time.process_time() < 0.25: pass"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
    return "done"

def naps(n: int) -> str:
    """Computes, and naps in between."""
    for _ in range(25):
        end = time.process_time() + 0.01
        while time.process_time() < end: pass
        time.sleep(0.01)
    return "done"
'''


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[int]:
    """The process of a program that has printed a line, or whose child has."""
    words = [sys.executable, "-S", "-c", request.param]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        os.killpg(process.pid, 9)


def looks(pid: int) -> list[bool]:
    since, of_process = time.monotonic(), CpuUsage(pid)
    found = []
    for _ in range(4):
        time.sleep(0.06)
        found.append(of_process.is_computing(since))
    return found


@pytest.mark.parametrize("program", [SLEEP], indirect=True)
def test_what_sleeps_does_not_compute(program: int) -> None:
    while stat_fields(b"/proc/%d/stat" % program)[0] != b"S":  # it has printed, but may wait for a core
        time.sleep(0.01)
    assert not any(looks(program)[1:])


@pytest.mark.parametrize("program", [SPIN, NAP_IN_BETWEEN, SPIN_IN_A_CHILD, SPIN_IN_SHORT_CHILDREN], indirect=True)
def test_what_computes_is_seen_at_each_look(program: int) -> None:
    assert all(looks(program))


@pytest.mark.parametrize("program", [SPIN], indirect=True)
def test_where_the_kernel_does_not_say_how_long_they_waited(program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(path: bytes, read: object = core_time.read_small_file) -> bytes:
        if path.endswith((b"schedstat", b"children")):
            raise FileNotFoundError(path)
        return read(path)  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(core_time, "read_small_file", content)
    assert all(looks(program))


@pytest.mark.parametrize("program", [SLEEP], indirect=True)
def test_what_came_before_a_call_is_not_spread_over_it(program: int) -> None:
    """A worker that was idle for long and computes now does not count as sleeping."""
    of_process = CpuUsage(program)
    of_process._at -= 1000
    of_process._last.tasks_ns = {task: ns - 30_000_000 for task, ns in of_process._last.tasks_ns.items()}
    assert of_process.is_computing(time.monotonic() - 0.05)


def test_a_process_that_is_gone_counts() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert CpuUsage(process.pid).is_computing(0.0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["child", "naps"])
def test_such_calls_do_not_crowd_each_other(tmp_path: Path, name: str) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    target, pool = ObjectRef(ModuleRef(None, str(tmp_path / "tools.py")), name), ToolPool(limit=2)

    async def most_at_once() -> int:
        works = [asyncio.create_task(pool.run(target, {"n": 1})) for _ in range(8)]
        most = 0
        while not all(work.done() for work in works):
            most = max(most, len(pool._roster.workers("busy", "slow")))
            await asyncio.sleep(0.01)
        await asyncio.gather(*works)
        return most

    try:
        assert asyncio.run(most_at_once()) <= 4
    finally:
        pool.close()
