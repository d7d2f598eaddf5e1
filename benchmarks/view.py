"""The pages of `toolwise view` on many rollouts: makes a run of 100,000 and measures what a reader waits for.

    python benchmarks/view.py --out /tmp/view-benchmark

Reports the time to the first paint of the table and of the overview in Chromium, of filters, sorts and text searches
over HTTP, and the memory of the server. Filters and searches are the slowest of five each. The rollouts have five
messages and about two kilobytes of text each. Then it trains the model that ships for `--steps` steps and compares the
time that writing the index of a step takes with that of the step. Exits with status 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_line
from toolwise.training.records import RolloutRecord, StepRecord, read_records
from toolwise.training.rollout_files import compress_old_files
from toolwise.training.rollout_index import Location, index_row, write_index
from toolwise.training.trackers.jsonl import read_metrics

PER_FILE = 256
WORDS = ["river", "well", "mill", "bridge", "tower", "quarry", "harbour", "orchard", "meadow", "castle", "forest"]
KINDS, TOOLS = ("lookup", "arithmetic", "known", "two_step"), ("search", "calculator", "python")


FILTERS = [
    {"kind": "lookup"},
    {"tool": "python"},
    {"score_min": "0.5"},
    {"correct": "false"},
    {"route": "ANSWER"},
]
SORTS = [{"sort": name, "desc": "true"} for name in ("score", "cost", "question", "tokens", "kind")]
TEXTS = [{"q": text} for text in ("needle in a haystack", "quarry castle", "search", "Answer: 77", "score")]
QUERIES: tuple[tuple[str, float | None, list[dict[str, str]]], ...] = (
    ("filters", 0.3, FILTERS),
    ("sorts", None, SORTS),
    ("text searches", 2.0, TEXTS),
)
"""What, its aim in seconds, and five of them."""
PAGES = (("the table", "#/rollouts", "tbody tr"), ("the overview", "#/overview", ".u-wrap"))


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


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    aim: float | None = None
    """At most this; None: it is only reported."""

    @property
    def missed(self) -> bool:
        return self.aim is not None and self.value > self.aim

    def __str__(self) -> str:
        aim = "" if self.aim is None else f" (aim: {self.aim:g}{', MISSED' if self.missed else ''})"
        return f"{self.name}: {self.value:.3g} {self.unit}{aim}"


def make_run(out: Path, count: int, plain_steps: int = 20) -> None:
    rng, folder = random.Random(0), out / "rollouts"
    folder.mkdir(parents=True)
    metrics = []
    for step in range(1, -(-count // PER_FILE) + 1):
        records = [record(rng, step, n) for n in range(min(PER_FILE, count - (step - 1) * PER_FILE))]
        write_file(folder / f"step-{step:06d}.jsonl", records)
        metrics.append(
            {"step": step, "score/mean": 0.4 + 0.1 * rng.random(), "time/rollout_s": 3.0, "time/update_s": 2.0}
        )
    if plain_steps:
        compress_old_files(folder, "step", plain_steps)
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))


def write_file(path: Path, records: list[RolloutRecord]) -> float:
    """Write the lines and their index; returns the seconds for the index."""
    lines = [json_line(r.to_json()) for r in records]
    write_atomic(path, b"".join(lines))
    began, offset, rows = time.perf_counter(), 0, []
    for one, line in zip(records, lines, strict=True):
        rows.append(index_row(one, Location(offset, len(line))))
        offset += len(line)
    write_index(path, rows)
    return time.perf_counter() - began


def index_share(out: Path, steps: int) -> list[Figure]:
    """Writing the index of a step, as a share of the step: both of the same rollouts, of a training of a few steps."""
    import toolwise
    from toolwise.demo.tasks import write_rows

    write_rows(out / "train.jsonl", 200, seed=0, split="train")
    config = {
        "model": {"path": "builtin:small"},
        "data": {"train": str(out / "train.jsonl"), "batch_size": 32},
        "tools": ["calculator", "search"],
        "rollout": {"n": 8, "max_new_tokens": 48},
        "reward": {"function": "toolwise.demo.reward:small_world_reward"},
        "trainer": {"total_steps": steps, "save_every": steps, "console": False},
    }
    toolwise.train(config, out=out / "training")
    lines = read_metrics(out / "training" / "metrics.jsonl")
    step_s = statistics.median(line["time/step_s"] for line in lines if line["step"] > 1)
    records = read_records(out / "training" / "rollouts" / f"step-{steps:06d}.jsonl")
    index_s = statistics.median(write_file(out / "step-000001.jsonl", records) for _ in range(20))
    return [
        Figure(f"a step of {len(records)} rollouts", step_s, "s"),
        Figure("writing its index", 1000 * index_s, "ms"),
        Figure("share of the step", 100 * index_s / step_s, "%", aim=2),
    ]


def slowest(client: httpx.Client, *queries: dict[str, str]) -> float:
    seconds = []
    for query in queries:
        began = time.perf_counter()
        answer = client.get("api/rollouts", params=query)
        answer.raise_for_status()
        seconds.append(time.perf_counter() - began)
    return max(seconds)


def first_paint(address: str, route: str, selector: str) -> float | None:
    """Seconds; None if there is no browser."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        return None
    from playwright.sync_api import sync_playwright

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


def measure_pages(run: Path, port: int, *, browser: bool) -> list[Figure]:
    command = [sys.executable, "-m", "toolwise", "view", run, "--port", str(port), "--no-browser"]
    began = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        assert server.stdout is not None
        address = re.findall(r"http://\S+", server.stdout.readline())[0]
        found = [Figure("from the command to the first answer", time.perf_counter() - began, "s")]
        with httpx.Client(base_url=address, timeout=60) as client:
            client.get("api/runs").raise_for_status()
            for what, aim, queries in QUERIES:
                found.append(Figure(f"slowest of {len(queries)} {what}", slowest(client, *queries), "s", aim))
        for page, route, selector in PAGES if browser else ():
            seconds = first_paint(address, route, selector)
            if seconds is None:
                print(f"first paint of {page}: not measured, there is no browser")
            else:
                found.append(Figure(f"first paint of {page}", seconds, "s", aim=1.5))
        return [*found, Figure("most memory of the server", memory_mb(server.pid), "MB", aim=300)]
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("view-benchmark"))
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--port", type=int, default=8155, help="0: any free port")
    parser.add_argument("--plain-steps", type=int, default=20, help="as records.plain_steps; 0: all are plain")
    parser.add_argument("--steps", type=int, default=4, help="training steps to compare the index with; 0: none")
    parser.add_argument("--browser", action=argparse.BooleanOptionalAction, default=True, help="measure first paints")
    options = parser.parse_args()
    run = options.out / "run"
    if not run.exists():
        make_run(run, options.rollouts, options.plain_steps)
    size = sum(path.stat().st_size for path in (run / "rollouts").glob("*.jsonl*"))
    print(f"{options.rollouts:,} rollouts, {size / 1e6:.0f} MB of lines")
    figures = measure_pages(run, options.port, browser=options.browser)
    if options.steps:
        shutil.rmtree(options.out / "training", ignore_errors=True)
        figures += index_share(options.out, options.steps)
    print("\n".join(map(str, figures)))
    sys.exit(any(figure.missed for figure in figures))


if __name__ == "__main__":
    main()
