"""The pages of `toolwise view` on many rollouts: makes a run of 100,000 and measures what a reader waits for.

    python benchmarks/view.py --out /tmp/view-benchmark

Reports the time to the first paint of the table and of the overview in Chromium, of filters, sorts and text searches
over HTTP, the memory of the server, and what writing the index adds to a training step. Filters and searches are the
slowest of five each. The rollouts have five messages and about two kilobytes of text each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from toolwise.training.records import RolloutRecord, StepRecord
from toolwise.training.rollout_index import Location, index_row, write_index

PER_FILE = 256
WORDS = ["river", "well", "mill", "bridge", "tower", "quarry", "harbour", "orchard", "meadow", "castle", "forest"]
KINDS, TOOLS = ("lookup", "arithmetic", "known", "two_step"), ("search", "calculator", "python")


def record(rng: random.Random, step: int, number: int) -> RolloutRecord:
    tool, right = rng.choice(TOOLS), rng.random() < 0.5
    text = " ".join(rng.choices(WORDS, k=250))
    name = f"step-{step}/{number // 8}/{number % 8}"
    call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": '{"query": "wells"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Use a tool where it helps."},
        {"role": "user", "content": f"How many {rng.choice(WORDS)}s has place {rng.randrange(10_000)}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "c", "name": tool},
        {"role": "assistant", "content": f"Answer: {rng.randrange(1000)}"},
    ]
    return RolloutRecord(
        rollout_id=name,
        group_id=name.rpartition("/")[0],
        task_id=f"task-{rng.randrange(5000)}",
        kind=rng.choice(KINDS),
        route=rng.choice(("ANSWER", "SEARCH-FAMILY")),
        messages=messages,
        score=float(right) - 0.05,
        metrics={"correct": float(right)},
        reason="needle in a haystack" if rng.random() < 1e-4 else "right" if right else "wrong",
        stop_reason=rng.choice(("answered", "answered", "max_steps")),
        cost=rng.random(),
        calls={tool: 1},
        trained_on=True,
        steps=[StepRecord(rng.gauss(0, 1), None, 20), StepRecord(rng.gauss(0, 1), None, 8)],
    )


def make_run(out: Path, count: int) -> tuple[float, float]:
    """Write the run; returns seconds for the lines and for the index, per file."""
    from toolwise.serialization.files import write_atomic
    from toolwise.serialization.json_text import json_line

    rng, folder, lines_s, index_s = random.Random(0), out / "rollouts", 0.0, 0.0
    folder.mkdir(parents=True)
    metrics = []
    files = -(-count // PER_FILE)
    for step in range(1, files + 1):
        records = [record(rng, step, n) for n in range(min(PER_FILE, count - (step - 1) * PER_FILE))]
        path, began = folder / f"step-{step:06d}.jsonl", time.perf_counter()
        lines = [json_line(r.to_json()) for r in records]
        write_atomic(path, b"".join(lines))
        written = time.perf_counter()
        offset, rows = 0, []
        for one, line in zip(records, lines, strict=True):
            rows.append(index_row(one, Location(offset, len(line))))
            offset += len(line)
        write_index(path, rows, offset)
        lines_s, index_s = lines_s + written - began, index_s + time.perf_counter() - written
        metrics.append(
            {"step": step, "score/mean": 0.4 + 0.1 * rng.random(), "time/rollout_s": 3.0, "time/update_s": 2.0}
        )
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return lines_s / files, index_s / files


def slowest(client: httpx.Client, *queries: dict[str, str]) -> float:
    seconds = []
    for query in queries:
        began = time.perf_counter()
        answer = client.get("api/rollouts", params=query)
        answer.raise_for_status()
        seconds.append(time.perf_counter() - began)
    return max(seconds)


def first_paint(address: str, route: str, selector: str) -> float:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto("about:blank")
        began = time.perf_counter()
        page.goto(f"{address}{route}")
        page.wait_for_selector(selector)
        seconds = time.perf_counter() - began
        browser.close()
    return seconds


def memory_mb(pid: int, name: str = "VmHWM") -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("view-benchmark"))
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--port", type=int, default=8155)
    options = parser.parse_args()
    if not (options.out / "rollouts").exists():
        lines_s, index_s = make_run(options.out, options.rollouts)
        print(f"{PER_FILE} rollouts: lines {1000 * lines_s:.1f} ms, index {1000 * index_s:.1f} ms")
    size = sum(path.stat().st_size for path in (options.out / "rollouts").glob("*.jsonl"))
    began = time.perf_counter()
    command = [sys.executable, "-m", "toolwise", "view", options.out, "--port", str(options.port), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        assert server.stdout is not None
        server.stdout.readline()
        address = f"http://127.0.0.1:{options.port}/"
        print(
            f"{options.rollouts:,} rollouts, {size / 1e6:.0f} MB of lines: ready in {time.perf_counter() - began:.2f} s"
        )
        with httpx.Client(base_url=address, timeout=60) as client:
            client.get("api/runs").raise_for_status()
            filters = [
                {"kind": "lookup"},
                {"tool": "python"},
                {"score_min": "0.5"},
                {"correct": "false"},
                {"route": "ANSWER"},
            ]
            sorts = [{"sort": name, "desc": "true"} for name in ("score", "cost", "question", "tokens", "kind")]
            texts = [{"q": text} for text in ("needle in a haystack", "quarry castle", "search", "Answer: 77", "score")]
            for what, queries in (("filters", filters), ("sorts", sorts), ("text searches", texts)):
                print(f"slowest of {len(queries)} {what}: {slowest(client, *queries):.3f} s")
        for page, route, selector in (
            ("the table", "#/rollouts", "tbody tr"),
            ("the overview", "#/overview", ".u-wrap"),
        ):
            print(f"first paint of {page}: {first_paint(address, route, selector):.2f} s")
        print(f"memory of the server: at most {memory_mb(server.pid):.0f} MB")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
