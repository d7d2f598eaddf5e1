"""The limit on threads, whichever process starts them; numerical libraries stay below it."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolwise.sandbox import ProgramSandbox, Sandbox, process_limits
from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.process_limits import MAX_THREADS, check_memory, check_processes, oom_kills
from toolwise.sandbox.process_tree import ProcessTree
from toolwise.sandbox.processes import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
MESSAGES = [{"role": "assistant", "content": "4"}]
BOMB = f"""
import _thread, threading, time
threading.stack_size(32768)
def bomb(count={2 * MAX_THREADS}):
    for _ in range(count):
        _thread.start_new_thread(time.sleep, (60,))
    time.sleep(60)
"""
POOL = f"""
from concurrent.futures import ThreadPoolExecutor
import time
from contextlib import nullcontext
def pool():
    with ThreadPoolExecutor({MAX_THREADS // 2}) as threads:
        return float(sum(threads.map(lambda n: time.sleep(0.3) or 1, range({MAX_THREADS // 2}))))
"""


@pytest.mark.parametrize(
    ("tier", "permissions"),
    [("standard", []), ("basic", []), ("standard", ["subprocess"]),
     pytest.param("namespaced", [], marks=pytest.mark.namespaced)],
)  # fmt: skip
def test_a_reward_with_too_many_threads_is_ended(tmp_path: Path, tier: Any, permissions: list[str]) -> None:
    (tmp_path / "r.py").write_text(f"{BOMB}\ndef f(messages, truth): bomb()\ndef g(messages, truth): return 1.0\n")
    with Sandbox(tier, timeout_s=20.0, workers=1, permissions=permissions) as sandbox:
        if not sandbox.report().complete:
            pytest.skip(sandbox.describe())
        began = time.monotonic()
        result = sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None)
        assert result.error is not None
        assert result.error.kind == "too_big"
        assert f"more than {MAX_THREADS} threads" in result.error.message
        assert time.monotonic() - began < 15
        assert sandbox.evaluate(f"{tmp_path / 'r.py'}:g", MESSAGES, None).score == 1.0


def test_a_reward_that_may_start_processes_cannot_lower_the_limits_of_the_trainer(tmp_path: Path) -> None:
    lower = "resource.prlimit(truth, resource.RLIMIT_CORE, (0, 0))"
    (tmp_path / "r.py").write_text(f"import resource\ndef f(messages, truth): {lower}; return 1.0\n")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if before[1] == 0:
        pytest.skip("there is nothing to lower")
    with Sandbox(timeout_s=20.0, workers=1, permissions=["subprocess"]) as sandbox:
        if not sandbox.report().complete:
            pytest.skip(sandbox.describe())
        result = sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, os.getpid())
    assert resource.getrlimit(resource.RLIMIT_CORE) == before
    assert result.error is not None
    assert result.error.kind == "denied"


DAEMONS = """
import os, time
def leave(count, size):
    for _ in range(count):
        if os.fork() == 0:
            os.setsid(); os.environ.clear()
            x = bytearray(os.urandom(1000)) * (size // 1000)
            time.sleep(60)
    time.sleep(60)
def many(messages, truth): leave(80, 1000)
def large(messages, truth): leave(6, 100_000_000)
"""


@pytest.mark.parametrize(
    ("tier", "permissions"),
    [("basic", []), pytest.param("standard", ["subprocess"], marks=pytest.mark.long),
     pytest.param("namespaced", ["subprocess"], marks=pytest.mark.namespaced)],
)  # fmt: skip
def test_limits_hold_for_daemons_too(tmp_path: Path, tier: Any, permissions: list[str]) -> None:
    (tmp_path / "r.py").write_text(DAEMONS)
    with Sandbox(tier, timeout_s=20.0, memory_mb=256, workers=1, permissions=permissions) as sandbox:
        for name, kind, words in (("many", "too_big", "64 processes"), ("large", "memory", "together")):
            result = sandbox.evaluate(f"{tmp_path / 'r.py'}:{name}", MESSAGES, None)
            assert result.error is not None
            assert (result.error.kind, words in result.error.message) == (kind, True), result.error


@pytest.mark.parametrize("tier", ["basic", "standard", pytest.param("namespaced", marks=pytest.mark.namespaced)])
def test_a_program_with_too_many_threads_is_ended(tier: Any) -> None:
    sandbox = ProgramSandbox("python", tier, timeout_s=20.0)
    if not sandbox.report().complete:
        pytest.skip(str(sandbox.report()))
    folder = sandbox.open_folder()
    result = asyncio.run(sandbox.run(f"{BOMB}\nbomb()", folder))
    asyncio.run(sandbox.close_folder(folder))
    sandbox.close()
    assert (result.kind, result.message) == ("too_big", f"it started more than {MAX_THREADS} threads")


def test_thread_pools_are_not_a_bomb(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(f"{POOL}\ndef f(messages, truth): return pool()\n")
    with Sandbox(timeout_s=20.0, memory_mb=2048, workers=1) as sandbox:
        result = sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None)
    assert result.error is None
    assert result.score == MAX_THREADS // 2


@pytest.mark.long
@pytest.mark.parametrize("permissions", [[], ["subprocess"]])
def test_threads_of_torch_and_numpy_are_not_a_bomb(tmp_path: Path, permissions: list[str]) -> None:
    body = """
    import numpy, torch
    torch.set_num_threads(8)
    a = torch.rand(600, 600)
    return float((a @ a).shape[0] + numpy.ones((300, 300)).dot(numpy.ones((300, 300)))[0, 0])
"""
    (tmp_path / "r.py").write_text(f"def f(messages, truth):{body}")
    with Sandbox(timeout_s=60.0, memory_mb=8192, workers=1, permissions=permissions) as sandbox:
        result = sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None)
    assert result.error is None, result.error
    assert result.score == 900.0


def test_threads_are_counted_without_a_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    more = [threading.Thread(target=over.wait) for _ in range(5)]
    for thread in more:
        thread.start()
    count = len(os.listdir("/proc/self/task"))
    try:
        for most, too_many in ((count, False), (count - 1, True)):
            monkeypatch.setattr(process_limits, "MAX_THREADS", most)
            with pytest.raises(WorkerFault, match="more than") if too_many else nullcontext():
                process_limits.check_threads(["/proc/self"])
    finally:
        over.set()
        for thread in more:
            thread.join()


def test_many_processes_are_called_so_though_their_threads_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = len(os.listdir("/proc/self/task"))
    monkeypatch.setattr(process_limits, "MAX_THREADS", process_limits.MAX_PROCESSES * threads)
    with pytest.raises(WorkerFault, match=f"more than {process_limits.MAX_PROCESSES} processes"):
        process_limits.check_threads(["/proc/self"] * (process_limits.MAX_PROCESSES + 1))


def test_oom_kills_are_read_from_the_kernel() -> None:
    assert oom_kills() >= 0


def test_processes_and_their_memory_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "x = bytearray(60_000_000); print(flush=True); input()"
    started = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert started.stdout is not None
    assert started.stdin is not None
    started.stdout.readline()
    tree = ProcessTree(started, "mark")
    check_memory(tree, 500)
    with pytest.raises(WorkerFault) as grown:
        check_memory(tree, 30)
    assert grown.value.kind == "memory"
    monkeypatch.setattr(process_limits, "MAX_PROCESSES", 0)
    with pytest.raises(WorkerFault, match="more than 0 processes") as many:
        check_memory(tree, 500)
    assert many.value.kind == "too_big"
    monkeypatch.setattr(process_limits, "MAX_THREADS", 0)  # a fork bomb passes this limit too
    with pytest.raises(WorkerFault, match="more than 0 processes"):
        check_processes(cast(Process, SimpleNamespace(popen=tree)), 500, children=True)
    started.communicate(b"\n")
