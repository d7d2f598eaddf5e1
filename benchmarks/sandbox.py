"""Benchmark the reward sandbox against in-process calls and fresh subprocesses.

python benchmarks/sandbox.py [CALLS]        CALLS: calls of the memory-growth part; 20,000 by default
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolwise.messages import Message
from toolwise.rewards.results import read_results
from toolwise.sandbox import Sandbox

REWARD = """
def pointwise(messages, ground_truth):
    return float(str(ground_truth) in (messages[-1].content or ""))

def batch(rollouts_messages, ground_truths):
    return [float(str(t) in (m[-1].content or "")) for m, t in zip(rollouts_messages, ground_truths)]
"""
ROLLOUTS, TURNS, LETTERS = 64, 8, 1_150


def conversation(number: int) -> list[dict[str, Any]]:
    text = f"{number} " + "lorem ipsum " * (LETTERS // 12)
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn in range(TURNS)]


def best_of(work: Callable[[], object], times: int = 7) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def in_process(batch: Callable[..., Any], rollouts: list[Any], truths: list[Any]) -> None:
    """Call the same function in this process, with JSON encoding and decoding of arguments and results."""
    given, answers = json.loads(json.dumps([rollouts, truths]))
    results = read_results(batch([[Message.model_validate(m) for m in r] for r in given], answers), len(answers))
    json.loads(json.dumps([result.model_dump_json() for result in results]))


def taken_by(pids: list[int]) -> tuple[int, int]:
    """Total resident KiB and open descriptors of some processes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024, sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def fresh_subprocess(path: Path) -> None:
    program = f"import runpy; print(runpy.run_path({str(path)!r})['pointwise'].__name__)"
    subprocess.run([sys.executable, "-c", f"import toolwise.types; {program}"], check=True, capture_output=True)


def main(calls: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Sandbox(timeout_s=30) as sandbox:
        path = Path(folder) / "reward.py"
        path.write_text(REWARD)
        names = runpy.run_path(str(path))
        rollouts, truths = [conversation(i) for i in range(ROLLOUTS)], list(range(ROLLOUTS))
        size = len(json.dumps(rollouts))
        here = best_of(lambda: in_process(names["batch"], rollouts, truths))
        there = best_of(lambda: sandbox.evaluate_batch(f"{path}:batch", rollouts, truths))
        print(f"batch of {ROLLOUTS} ({size / 1e6:.2f} MB): {there * 1e3:.1f} ms, {there / here:.2f} x in-process")

        short = [{"role": "assistant", "content": "4"}]
        one = f"{path}:pointwise"
        together = best_of(lambda: sandbox.evaluate_batch(one, [short] * 4000, [4] * 4000), 3) / 4000
        single = best_of(lambda: [sandbox.evaluate(one, short, 4) for _ in range(500)], 3) / 500
        fresh = best_of(lambda: fresh_subprocess(path), 3)
        print(
            f"pointwise, sent together: {1 / together:,.0f} calls/s, {fresh / together:,.0f} x a fresh subprocess each"
        )
        print(f"pointwise, one at a time: {1 / single:,.0f} calls/s, {fresh / single:,.0f} x a fresh subprocess each")

        growth(one, short, calls)


def growth(reference: str, messages: list[dict[str, Any]], calls: int) -> None:
    """Memory growth of the trainer and of workers never replaced, over `calls` calls after a warm-up of 5,000."""
    with Sandbox(timeout_s=30, max_calls=10 * calls + 10_000) as sandbox:

        def call(count: int) -> None:
            for _ in range(count // 1000):
                sandbox.evaluate_batch(reference, [messages] * 1000, [4] * 1000)

        call(5_000)
        workers = sandbox.pids()
        before = taken_by([os.getpid()]), taken_by(workers)
        call(calls)
        same = sorted(sandbox.pids()) == sorted(workers)
        after = taken_by([os.getpid()]), taken_by(sandbox.pids())
    for who, old, new in zip(("trainer", "workers"), before, after, strict=True):
        print(f"{calls:,} calls, {who}: {new[0] - old[0]:+,} KiB resident, {new[1] - old[1]:+} descriptors")
    print(f"the same {len(workers)} processes served to the end: {same}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
