"""Time and memory until a run's tasks are ready: `python benchmarks/data.py [--rows 5000000] [--format parquet]`.

Writes short rows to a temporary folder, then prepares the training tasks of a run three times, each in a process of its
own: as a list of tasks in memory (skipped above a million rows), the first time with a cache, which converts the file,
and the second time. Prepared means: opened, checked against a tool and a reward, and ready to give the first batch.
Memory is the peak of the process (VmHWM), pages of mapped files included. Removes what it wrote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from os import getloadavg
from pathlib import Path
from typing import Any

BATCH = 256
IN_MEMORY_ROWS = 1_000_000


def make_rows(count: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        yield {
            "data_source": "sums",
            "prompt": [
                {"role": "system", "content": "Put your final answer as `#### <answer>`."},
                {"role": "user", "content": f"What is {index} + {index * 7 % 1000}?"},
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(index + index * 7 % 1000)},
            "extra_info": {"split": "train", "index": index, "tools": ["calculator"]},
        }


def write_file(path: Path, count: int) -> None:
    rows = make_rows(count)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = pa.Table.from_pylist(list(islice(rows, 100_000)))
    with pq.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        while part := list(islice(rows, 100_000)):
            writer.write_table(pa.Table.from_pylist(part, schema=first.schema))


def prepare(path: Path, cache: Path, in_memory: bool) -> dict[str, float]:
    """What `assemble` does with the training tasks, without a model."""
    from toolwise.config.schema import RunConfig
    from toolwise.data import Batches, load_tasks, open_tasks
    from toolwise.data.task_set import distinct_tasks
    from toolwise.tools.catalog import build_tools
    from toolwise.training.evaluate import build_scoring
    from toolwise.training.rollout_setup import check_tasks

    config = RunConfig.model_validate(
        {"reward": {"function": "toolwise.rewards.library.gsm8k:gsm8k_reward", "sandbox": {"tier": "off"}}}
    )
    tools, scoring = build_tools(["calculator"]), build_scoring(config.reward)
    before, start, cpu = memory_mb("VmRSS"), time.perf_counter(), time.process_time()
    tasks = check_tasks(config, load_tasks(path) if in_memory else open_tasks(path, cache=cache), tools)
    scoring.check(list(distinct_tasks(tasks)))
    batches = Batches(tasks, BATCH, seed=0)
    next(batches)
    ready, cpu = time.perf_counter() - start, time.process_time() - cpu
    start = time.perf_counter()
    for _ in range(10):
        next(batches)
    batch_ms = (time.perf_counter() - start) * 100
    peak = memory_mb("VmHWM")
    return {"ready_s": ready, "cpu_s": cpu, "peak_mb": peak, "before_mb": before, "batch_ms": batch_ms}


def memory_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--format", choices=["jsonl", "parquet"], default="parquet")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        path, cache, mode = options.measure
        print(json.dumps(prepare(Path(path), Path(cache), mode == "list")))
        return
    print(f"{options.rows:,} rows, {options.format}, load average {getloadavg()[0]:.1f}")
    print("| | ready, s | CPU, s | peak memory, MB | of it before, MB | batch of 256, ms |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="toolwise-data-") as folder:
        path = Path(folder) / f"train.{options.format}"
        write_file(path, options.rows)
        for mode in [*(["list"] if options.rows <= IN_MEMORY_ROWS else []), "first time", "second time"]:
            command = [sys.executable, __file__, "--measure", str(path), str(Path(folder) / "cache"), mode]
            result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(f"| {mode} | " + " | ".join(f"{cell:,.1f}" for cell in result.values()) + " |", flush=True)
        sizes = {"file": path.stat().st_size, "cache": sum(f.stat().st_size for f in Path(folder).glob("cache/*/*"))}
    print(", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
