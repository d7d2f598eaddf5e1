"""Which calls are blamed when a worker dies; with a real pool and real workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolwise.sandbox import dispatch
from toolwise.sandbox.dispatch import CALLS_PER_FRAME, run_batch, run_in_one_frame, run_pointwise
from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.layers.hardening import Plan
from toolwise.sandbox.pool import Pool
from toolwise.sandbox.targets import resolve

SOURCE = """
import os, threading
seen = []
def f(messages, truth):
    if truth == "exit": os._exit(1)
    if truth == "patch": os.getcwd = None
    if truth == "raise": raise ValueError
    if truth == "leave": raise SystemExit
    seen.append(truth)
    return float(len(seen))
def b(rollouts_messages, ground_truths): return [0.5] * len(ground_truths)
"""
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(Plan(("limits",), "", memory_mb=256), workers=2, max_calls=10_000, timeout_s=5.0, require=False)
    yield pool
    pool.close()


def _calls(truths: list[str]) -> list[dict[str, Any]]:
    return [{"messages": [], "ground_truth": truth, "kwargs": {}} for truth in truths]


def _kinds(answers: list[Any]) -> list[str]:
    return [answer["fault"]["kind"] if "fault" in answer else "ok" for answer in answers]


def _target(tmp_path: Path, name: str = "f") -> Any:
    (tmp_path / "r.py").write_text(SOURCE)
    return resolve(f"{tmp_path / 'r.py'}:{name}")


def test_the_first_the_last_and_the_only_one_can_be_the_culprit(pool: Pool, tmp_path: Path) -> None:
    target = _target(tmp_path)
    assert _kinds(run_in_one_frame(pool, target, _calls(["exit"]), 5.0)) == ["died"]
    assert _kinds(run_in_one_frame(pool, target, _calls(["exit", "", ""]), 5.0)) == ["died", "ok", "ok"]
    assert _kinds(run_in_one_frame(pool, target, _calls(["", "", "exit"]), 5.0)) == ["ok", "ok", "died"]


def test_after_a_patch_the_rest_goes_to_a_fresh_worker(pool: Pool, tmp_path: Path) -> None:
    answers = run_in_one_frame(pool, _target(tmp_path), _calls(["", "patch", "", ""]), 5.0)
    assert ['"score":' + s in a["result"] for a, s in zip(answers, ["1.0", "2.0", "1.0", "2.0"], strict=True)] == [
        True
    ] * 4


def test_one_that_raises_does_not_stop_those_behind_it(pool: Pool, tmp_path: Path) -> None:
    answers = run_in_one_frame(pool, _target(tmp_path), _calls(["", "raise", "", "leave", ""]), 5.0)
    assert _kinds(answers) == ["ok", "exception", "ok", "died", "ok"]
    assert ['"score":' + s in answers[i]["result"] for i, s in ((0, "1.0"), (2, "2.0"), (4, "1.0"))] == [True] * 3


def test_many_parts_keep_their_order(pool: Pool, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        count = 3 * CALLS_PER_FRAME + 5
        truths = ["exit" if i % 40 == 7 else "" for i in range(count)]
        answers = run_pointwise(pool, _target(tmp_path), _calls(truths), 5.0, threads)
    assert _kinds(answers) == ["died" if truth else "ok" for truth in truths]


def test_an_import_fault_applies_to_all_calls(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    answers = run_in_one_frame(pool, resolve(f"{tmp_path / 'broken.py'}:f"), _calls(["", ""]), 5.0)
    assert _kinds(answers) == ["import", "import"]


def test_a_batch_is_one_call(pool: Pool, tmp_path: Path) -> None:
    answers = run_batch(pool, _target(tmp_path, "b"), {"calls": _calls(["", ""])}, 5.0)
    assert answers is not None
    assert len(answers) == 2


def test_a_pointwise_function_is_no_batch_function(pool: Pool, tmp_path: Path) -> None:
    assert run_batch(pool, _target(tmp_path), {"calls": _calls([""])}, 5.0) is None


def test_unsendable_arguments_are_a_fault(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerFault, match="JSON"):
        run_batch(pool, _target(tmp_path, "b"), {"calls": _calls([""]), "kwargs": {"x": object()}}, 5.0)


def test_async_calls_without_an_answer_are_split_until_the_culprit_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []

    def overlapping(pool: Any, target: Any, calls: list[dict[str, Any]], timeout_s: float) -> dict[int, Any]:
        parts.append(len(calls))
        truths = [call["ground_truth"] for call in calls]
        return {} if "block" in truths else dict(enumerate(truths))

    def together(pool: Any, target: Any, calls: list[dict[str, Any]], timeout_s: float) -> list[Any]:
        parts.append(len(calls))
        return [call["ground_truth"] for call in calls]

    monkeypatch.setattr(dispatch, "run_overlapping_calls", overlapping)
    monkeypatch.setattr(dispatch, "run_in_one_frame", together)
    truths = ["" for _ in range(64)]
    truths[5] = "block"
    with ThreadPoolExecutor(2) as threads:
        for workers, first in ((1, [64]), (4, [16] * 4)):
            parts.clear()
            fake: Any = SimpleNamespace(workers=workers)
            assert run_pointwise(fake, None, _calls(truths), 1.0, threads, overlap=True) == truths  # type: ignore[arg-type]
            assert sorted(parts) == sorted([*first, *[first[0] // 8] * 8, *[1] * (first[0] // 8)])
