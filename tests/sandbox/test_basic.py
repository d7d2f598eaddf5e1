"""The tier `basic`: without kernel support there are still deadlines, limits and process cleanup."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_state import is_running

from toolwise.sandbox import Sandbox

MESSAGES = [{"role": "assistant", "content": "4"}]
SOURCE = """
import os, subprocess, sys, time

def score(messages, truth): return 1.0
def refused(messages, truth): raise PermissionError(1, "Operation not permitted")
def loop(messages, truth):
    while True: pass
def memory(messages, truth): x = bytearray(10 ** 9); return 1.0
def huge_file(messages, truth):
    with open("x", "wb") as f:
        for _ in range(500): f.write(bytes(10 ** 6))
def environment(messages, truth): return float("TOOLWISE_TEST_SECRET" in os.environ)
def daemon(messages, truth):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(truth, "w").write(str(os.getpid()))
            time.sleep(300)
        os._exit(0)
    time.sleep(0.2)
    return 1.0
def daemon_and_loop(messages, truth):
    daemon(messages, truth)
    while True: pass
def forked_return(messages, truth):
    os.fork()
    return 1.0
def exec_child(messages, truth):
    child = subprocess.Popen(["/bin/sleep", "300"])
    open(truth, "w").write(str(child.pid))
    while True: pass
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    (tmp_path / "r.py").write_text(SOURCE)
    with Sandbox("basic", timeout_s=0.8, memory_mb=128, workers=1) as sandbox:
        yield sandbox


def _kind(sandbox: Sandbox, tmp_path: Path, name: str, truth: object = None) -> str:
    result = sandbox.evaluate(f"{tmp_path / 'r.py'}:{name}", MESSAGES, truth)
    return result.error.kind if result.error else f"ok {result.score}"


@pytest.mark.parametrize(
    ("name", "kind"), [("score", "ok 1.0"), ("loop", "timeout"), ("memory", "memory"), ("huge_file", "too_big")]
)
def test_limits_hold(sandbox: Sandbox, tmp_path: Path, name: str, kind: str) -> None:
    assert _kind(sandbox, tmp_path, name) == kind


def test_other_refusals_are_not_attributed_to_the_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    assert _kind(sandbox, tmp_path, "refused") == "exception"
    with Sandbox("off") as off:
        assert _kind(off, tmp_path, "refused") == "exception"


def test_the_environment_is_clean(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLWISE_TEST_SECRET", "x")
    with Sandbox("basic", timeout_s=2.0) as fresh:
        assert _kind(fresh, tmp_path, "environment") == "ok 0.0"


def _gone(pid: int) -> bool:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if not is_running(pid):
            return True
        time.sleep(0.02)
    return False


@linux
@pytest.mark.parametrize("name", ["daemon", "daemon_and_loop", "exec_child"])
def test_what_it_started_ends_with_its_worker(sandbox: Sandbox, tmp_path: Path, name: str) -> None:
    _kind(sandbox, tmp_path, name, str(tmp_path / "pid"))
    pid = int((tmp_path / "pid").read_text())
    assert pid != os.getpid()
    sandbox.close()
    assert _gone(pid)


@linux
def test_a_fork_that_returns_does_not_answer_twice(sandbox: Sandbox, tmp_path: Path) -> None:
    assert _kind(sandbox, tmp_path, "forked_return") == "ok 1.0"
    assert _kind(sandbox, tmp_path, "score") == "ok 1.0"


def test_describe_names_the_tier(sandbox: Sandbox) -> None:
    assert "requested basic, got basic" in sandbox.describe()
