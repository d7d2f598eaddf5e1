"""Async rewards of a batch run concurrently in one worker; a hanging call does not cost the others their result."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from toolwise.concurrency import deadlines
from toolwise.messages import Message
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.function import Reward
from toolwise.sandbox import Sandbox, SandboxExecutor
from toolwise.sandbox.async_calls import run_overlapping
from toolwise.sandbox.harness import Harness
from toolwise.types import EvaluateResult, Rollout, StopReason, Task, Usage

SOURCE = """
import asyncio, math, os, time

async def f(messages, truth):
    print("begin", truth)
    await asyncio.sleep(0.05)
    if truth == "hang":
        await asyncio.sleep(1000)
    if truth == "block":
        time.sleep(1000)
    if truth == "stay":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if truth == "exit":
        os._exit(1)
    if truth == "leave":
        raise SystemExit(3)
    if truth == "raise":
        raise ValueError
    return 1.0

async def half_a_second(messages, truth):
    began = time.monotonic()
    await asyncio.sleep(0.5)
    return {"score": 1.0, "metrics": {"began": began, "ended": time.monotonic()}}

async def shared(messages, truth):
    print("begin")
    if truth.startswith("patch"):
        await asyncio.sleep(0.05)
        math.exp = lambda x: 99.0
        if truth == "patch and exit":
            await asyncio.sleep(0.3)
            os._exit(1)
        return 1.0
    await asyncio.sleep(0.01 if truth == "early" else 0.15)
    return math.exp(0.0)

async def in_a_thread(messages, truth):
    print("begin")
    await asyncio.to_thread(time.sleep, 0.02 * truth)
    return float(os.getpid())

async def all_of_them(rollouts_messages, ground_truths):
    return [await f(None, truth) for truth in ground_truths]

async def busy(messages, truth):
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    await asyncio.sleep(0.01)
    return 1.0
"""


@pytest.fixture
def reference(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "r.py").write_text(SOURCE)
    return lambda name: f"{tmp_path / 'r.py'}:{name}"


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(timeout_s=1.5, workers=1) as sandbox:
        yield sandbox


def kinds(results: list[EvaluateResult]) -> list[str]:
    return [result.error.kind if result.error else "ok" for result in results]


def rollouts(count: int) -> list[Rollout]:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    return [
        Rollout(f"r{i}", "g", 0, i, task, None, (), task.prompt, StopReason.ANSWERED, Usage()) for i in range(count)
    ]


@pytest.mark.parametrize("tier", ["standard", "off"])
def test_sixteen_that_wait_half_a_second_take_about_as_long_as_one(tier: str, reference: Callable[[str], str]) -> None:
    with Sandbox(tier, timeout_s=20, workers=1) as sandbox:  # type: ignore[arg-type]
        sandbox.signature_of(reference("half_a_second"))  # as at the start of a run: the worker is running
        evaluate = partial(sandbox.evaluate_batch, reference("half_a_second"), [[]] * 16, [None] * 16)
        assert_overlap(evaluate)


def assert_overlap(evaluate: Callable[[], list[EvaluateResult]]) -> None:
    """All sixteen wait at once, and so take about as long as one; the best of three tries, for a busy machine."""
    tries = []
    for _ in range(3):
        began = time.monotonic()
        results = evaluate()
        seconds = time.monotonic() - began
        assert kinds(results) == ["ok"] * 16
        spans = [(result.metrics["began"].score, result.metrics["ended"].score) for result in results]
        at_once = max(sum(begin <= instant < end for begin, end in spans) for instant, _ in spans)
        tries.append((at_once, seconds))
        if at_once == 16 and seconds < 1.0:  # one by one: 1, and 8 s
            return
    raise AssertionError(f"calls at once, and seconds: {tries}")


def test_async_calls_overlap_in_the_executors_too(reference: Callable[[str], str]) -> None:
    reward = Reward.of(reference("half_a_second"))
    with Sandbox(timeout_s=20, workers=1) as sandbox:
        sandbox.signature_of(reference("half_a_second"))
        for executor in (SandboxExecutor(sandbox), InProcessExecutor()):
            assert_overlap(lambda run=executor: asyncio.run(run.evaluate(reward, rollouts(16), step=0)))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("truth", "kind"),
    [("hang", "timeout"), ("block", "timeout"), ("stay", "timeout"), ("exit", "died"), ("leave", "died")],
)
def test_only_the_culprit_is_blamed(truth: str, kind: str, sandbox: Sandbox, reference: Callable[[str], str]) -> None:
    results = sandbox.evaluate_batch(reference("f"), [[]] * 5, ["", truth, "", "raise", ""])
    assert kinds(results) == ["ok", kind, "ok", "exception", "ok"]
    assert kinds(sandbox.evaluate_batch(reference("f"), [[]] * 2, ["", ""])) == ["ok", "ok"]


def labelled(truths: list[Any]) -> list[dict[str, Any]]:
    return [{"messages": [], "ground_truth": t, "kwargs": {}, "label": f"r{i}"} for i, t in enumerate(truths)]


@pytest.mark.parametrize("attack", ["patch", "patch and exit"])
def test_what_one_call_patches_reaches_no_other_s_score(
    attack: str, sandbox: Sandbox, reference: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    sandbox.on_print = lambda label, text: said.append(label)
    results = sandbox.run_calls(reference("shared"), labelled(["", "early", attack, ""]))
    assert [results[at].score for at in (0, 1, 3)] == [1.0, 1.0, 1.0]
    assert kinds(results)[2] == ("ok" if attack == "patch" else "died")
    assert said.count("r1") == 1  # it had already answered
    assert "shared: a call changed modules" in caplog.text


def test_threads_of_calls_under_way_are_no_change(sandbox: Sandbox, reference: Callable[[str], str]) -> None:
    said: list[str] = []
    sandbox.on_print = lambda label, text: said.append(text)
    sandbox.run_calls(reference("in_a_thread"), labelled([0, 1, 2, 3]))
    assert said == ["begin\n"] * 4  # each once
    before = sandbox.pids()
    sandbox.run_calls(reference("in_a_thread"), labelled([0, 1]))
    assert sandbox.pids() == before


def test_they_are_spread_over_all_workers(reference: Callable[[str], str]) -> None:
    with Sandbox(timeout_s=20, workers=2) as sandbox:
        results = sandbox.run_calls(reference("in_a_thread"), labelled([10] * 6))
    assert len({result.score for result in results}) == 2


@pytest.mark.parametrize("name", ["f", "all_of_them"])
@pytest.mark.parametrize("truths", [["stay"], ["", "stay", ""]])
def test_in_process_a_call_that_ignores_cancellation_is_left_behind(
    name: str, truths: list[str], reference: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "GRACE_S", 0.05)
    with Sandbox("off", timeout_s=0.3) as sandbox:
        results = sandbox.evaluate_batch(reference(name), [[]] * len(truths), truths)
    late = [truth == "stay" or name == "all_of_them" for truth in truths]
    assert kinds(results) == ["timeout" if is_late else "ok" for is_late in late]


def test_a_worker_stays_warm_after_a_clean_batch(sandbox: Sandbox, reference: Callable[[str], str]) -> None:
    sandbox.evaluate_batch(reference("f"), [[]] * 4, [""] * 4)
    before = sandbox.pids()
    sandbox.evaluate_batch(reference("f"), [[]] * 4, [""] * 4)
    assert sandbox.pids() == before


def test_prints_of_calls_that_overlap_are_told_apart(sandbox: Sandbox, reference: Callable[[str], str]) -> None:
    told: dict[str, str] = {}
    sandbox.on_print = told.__setitem__
    calls = [{"messages": [], "ground_truth": i, "kwargs": {}, "label": f"r{i}"} for i in range(4)]
    sandbox.run_calls(reference("f"), calls)
    assert told == {f"r{i}": f"begin {i}\n" for i in range(4)}


def test_time_that_others_take_is_not_charged(reference: Callable[[str], str]) -> None:
    answers: dict[int, object] = {}
    harness = Harness.load(reference("busy"))
    calls = [{"messages": [], "ground_truth": None} for _ in range(8)]
    assert run_overlapping(harness, calls, 0.6, answers.__setitem__)  # 0.8 s of work in all, 0.1 each
    assert all("result" in answer for answer in answers.values())  # type: ignore[operator]
    assert sorted(answers) == list(range(8))
    assert run_overlapping(harness, calls[:1], math.inf, answers.__setitem__)
