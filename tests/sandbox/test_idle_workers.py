"""Workers that are killed or stopped while idle: no call is blamed, and none waits long."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from toolwise.sandbox import Sandbox
from toolwise.sandbox.pool import Pool
from toolwise.sandbox.processes import Process
from toolwise.sandbox.worker import Worker
from toolwise.types import EvaluateResult

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
MESSAGES = [{"role": "assistant", "content": "4"}]
SOURCE = """
import os, signal, time
def f(messages, truth): return 1.0
def g(messages, truth): return 0.5
async def a(messages, truth): return 0.75
def b(rollouts_messages, ground_truths): return [0.25] * len(ground_truths)
def slow(messages, truth):
    open(truth, "w").write(str(os.getpid()))
    time.sleep(30)
def stops(messages, truth): os.kill(os.getpid(), signal.SIGSTOP); return 1.0
"""


@pytest.fixture(params=["basic", "standard", pytest.param("namespaced", marks=pytest.mark.namespaced)])
def sandbox(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    (tmp_path / "r.py").write_text(SOURCE)
    with Sandbox(request.param, timeout_s=20.0, workers=2) as sandbox:
        if not sandbox.report().complete:
            pytest.skip(sandbox.describe())
        yield sandbox


@pytest.fixture
def standard(tmp_path: Path) -> Iterator[Sandbox]:
    (tmp_path / "r.py").write_text(SOURCE)
    with Sandbox(timeout_s=20.0, workers=2) as sandbox:
        yield sandbox


def _at_rest(pool: Pool) -> list[Process]:
    spare = [pool._spare] if pool._spare is not None else []
    return [worker.process for idle in pool._idle.values() for worker in idle] + spare


def _signal_all(sandbox: Sandbox, number: int) -> int:
    """Send a signal to all idle workers and to no busy one."""
    pool = sandbox._pool
    with pool._lock:
        resting = _at_rest(pool)
        for process in resting:
            with suppress(ProcessLookupError):  # already killed
                os.kill(process.worker or process.pid, number)
    return len(resting)


def _score(result: EvaluateResult) -> float | None:
    assert result.error is None, result.error
    return result.score


def test_a_worker_that_was_killed_while_it_waited_is_not_handed_out(sandbox: Sandbox, tmp_path: Path) -> None:
    for name, score in (("f", 1.0), ("f", 1.0), ("b", 0.25)):
        results = sandbox.evaluate_batch(f"{tmp_path / 'r.py'}:{name}", [MESSAGES] * 8, [None] * 8)
        assert [_score(result) for result in results] == [score] * 8
        assert _signal_all(sandbox, signal.SIGKILL) >= 2
    assert _score(sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None)) == 1.0


def test_a_stopped_worker_and_a_stopped_spare_cost_a_moment(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None)
    stopped = _at_rest(sandbox._pool)
    assert _signal_all(sandbox, signal.SIGSTOP) == 2
    began = time.monotonic()
    results = sandbox.evaluate_batch(f"{tmp_path / 'r.py'}:f", [MESSAGES] * 8, [None] * 8)
    results.append(sandbox.evaluate(f"{tmp_path / 'r.py'}:g", MESSAGES, None))
    assert [_score(result) for result in results] == [1.0] * 8 + [0.5]
    assert time.monotonic() - began < 10
    assert all(process.popen.returncode is not None for process in stopped), "they are ended"


@pytest.mark.parametrize("name", ["f", "b", "a"])
def test_a_call_that_never_reached_its_worker_is_made_again(
    standard: Sandbox, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = f"{tmp_path / 'r.py'}:{name}"
    expected = [result.score for result in standard.evaluate_batch(reference, [MESSAGES] * 4, [None] * 4)]
    lost: list[int] = []

    def kill_and_pass(worker: Worker) -> bool:
        """As if it were killed right after it was checked."""
        os.kill(worker.process.worker, signal.SIGKILL)
        lost.append(worker.process.pid)
        return True

    monkeypatch.setattr(Worker, "is_ready", kill_and_pass)
    results = standard.evaluate_batch(reference, [MESSAGES] * 4, [None] * 4)
    assert [_score(result) for result in results] == expected
    assert lost


@pytest.mark.parametrize("oom_kills", [0, 1])
def test_a_death_during_a_call_is_blamed_on_it(tmp_path: Path, oom_kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Iterator[int] = iter([])
    monkeypatch.setattr("toolwise.sandbox.worker.oom_kills", lambda: next(counts, 3 + oom_kills))
    (tmp_path / "r.py").write_text(SOURCE)
    reference, note = f"{tmp_path / 'r.py'}:slow", tmp_path / "note"
    with Sandbox("basic", timeout_s=20.0, workers=1) as sandbox:
        counts = iter([3])  # when its worker starts
        found: list[EvaluateResult] = []
        call = threading.Thread(target=lambda: found.append(sandbox.evaluate(reference, MESSAGES, str(note))))
        call.start()
        _until(lambda: note.exists() and note.read_text() != "")
        os.kill(int(note.read_text()), signal.SIGKILL)
        call.join(20)
    assert found[0].error is not None
    assert found[0].error.kind == "died"
    assert "killed by SIGKILL" in found[0].error.message
    assert ("out of memory" in found[0].error.message) == bool(oom_kills)


def test_a_call_that_stops_itself_times_out(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(SOURCE)
    with Sandbox("basic", timeout_s=1.0, workers=1) as sandbox:
        result = sandbox.evaluate(f"{tmp_path / 'r.py'}:stops", MESSAGES, None)
        assert result.error is not None
        assert result.error.kind == "timeout"
        assert _score(sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None)) == 1.0


@pytest.mark.parametrize("seconds", [2.0, pytest.param(20.0, marks=pytest.mark.long)])
def test_killing_all_idle_workers_blames_no_call(standard: Sandbox, tmp_path: Path, seconds: float) -> None:
    killed, over = [0], threading.Event()

    def kill() -> None:
        while not over.wait(0.02):
            killed[0] += _signal_all(standard, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    until, results = time.monotonic() + seconds, []
    try:
        while time.monotonic() < until:
            for name in ("f", "a", "b"):
                results += standard.evaluate_batch(f"{tmp_path / 'r.py'}:{name}", [MESSAGES] * 8, [None] * 8)
    finally:
        over.set()
        killer.join()
    assert killed[0] > 2
    assert [result.error for result in results if result.error is not None] == []


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _idle_pids(sandbox: Sandbox) -> set[int]:
    return {worker.process.pid for idle in sandbox._pool._idle.values() for worker in idle}


def test_the_parts_of_a_reward_do_not_end_each_other_s_workers(standard: Sandbox, tmp_path: Path) -> None:
    def score_with(names: str) -> set[int]:
        for name in names:
            standard.evaluate_batch(f"{tmp_path}/r.py:{name}", [MESSAGES] * 8, [""] * 8)
        return _idle_pids(standard)

    first = score_with("fgb")
    assert score_with("fgbfgb") >= first  # none was ended; others may have been started beside them
    assert all(len(idle) <= 2 for idle in standard._pool._idle.values())


def test_workers_of_functions_that_are_no_longer_called_end(standard: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text("\n".join(f"def f{n}(messages, truth): return 1.0" for n in range(6)))
    for n in range(6):
        standard.evaluate(f"{tmp_path}/many.py:f{n}", MESSAGES, "")
    assert [reference[-2:] for reference in standard._pool._idle] == ["f2", "f3", "f4", "f5"]
    assert len(_idle_pids(standard)) == 4
