"""All figures of docs/benchmarks.md that need a GPU, one after the other, each with a time limit.

    python benchmarks/gpu_tables.py --out runs/gpu                       everything, about 40 minutes on one H200
    python benchmarks/gpu_tables.py --out runs/gpu --only step-135m serve
    python benchmarks/gpu_tables.py --out runs/gpu --minutes 9           what fits; call it again for the rest
    python benchmarks/gpu_tables.py --list

A part's output goes to OUT/NAME.log. A part that is done is not repeated, one that failed or ran out of time is. The
parts that TRL is compared in need `make bench-env`, or `--trl-python` with a Python that has TRL.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x")


@dataclass(frozen=True)
class Part:
    name: str
    limit_s: int
    words: tuple[str, ...]


def script(name: str, limit_s: int, words: str) -> Part:
    file, *options = words.split()
    return Part(name, limit_s, (str(HERE / file), *options))


PARTS = (
    script("step-135m", 150, "grpo_step.py --device cuda --shape 135m --only ours --rounds 1 --steps 30 --warm-up 2"),
    script("step-1.6b", 240, "grpo_step.py --device cuda --shape 1.6b --only ours --rounds 1 --steps 30 --warm-up 2"),
    script("serve", 240, "serve.py --device cuda --shape 1.6b --concurrent 256 --new-tokens 256 --rounds 2"),
    script("async", 240, "async_loop.py --device cuda --shape 135m --steps 8"),
    script("cluster", 240, "cluster.py --device cuda --shapes 135m 1.6b"),
    script("engine", 240, "engine.py"),
    script("lora", 240, "lora.py --device cuda --shape 1.6b-grouped --steps 5 --warm-up 2 --micro-batch 32768"),
    script("sft-135m", 90, "sft.py --device cuda --model 135M"),
    script("sft-1.6b", 120, "sft.py --device cuda --model 1.6B"),
    script("checkpoints", 240, "checkpoints.py --device cuda --shape 1.6b"),
    script("memory-3b", 150, "memory.py --device cuda --shape 3b"),
    script("memory-8b", 150, "memory.py --device cuda --shape 8b --lora-rank 16 --micro-batch-tokens 8192"),
    script("kernels", 120, "engine_kernels.py"),
    script("trl-135m", 300, "grpo_step.py --device cuda --shape 135m --rounds 1 --steps 3 --warm-up 1 --trl-batch 16"),
    script("trl-1.6b", 580, "grpo_step.py --device cuda --shape 1.6b --rounds 1 --steps 2 --warm-up 1 --trl-batch 8"),
    script(
        "trl-135m-lora", 300, "grpo_step.py --device cuda --shape 135m --lora 16 --rounds 1 --steps 3 --trl-batch 16"
    ),
    Part("tests-sharded", 120, (*TESTS, str(HERE.parent / "tests/learner/test_cuda.py"), "-k", "sharded")),
    Part("tests-async", 240, (*TESTS, str(HERE.parent / "tests/training/test_async_gpu.py"))),
)


def run(part: Part, out: Path, trl_python: str | None, limit_s: float) -> str:
    """Run one part; how it ended."""
    words = [sys.executable, *part.words]
    if trl_python is not None and part.name.startswith("trl"):
        words += ["--trl-python", trl_python]
    began = time.monotonic()
    with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        print("$", *words, file=log, flush=True)
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"ended after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # what it started holds the GPU, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took_s = time.monotonic() - began
    if status == 0:
        (out / f"{part.name}.done").write_text(f"{took_s:.0f} s, load {os.getloadavg()[0]:.1f}\n", encoding="utf-8")
    return f"{'done' if status == 0 else f'failed with status {status}'} in {took_s:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the logs")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing that may not fit")
    parser.add_argument("--trl-python", help="Python that has TRL")
    parser.add_argument("--list", action="store_true", help="print the parts")
    args = parser.parse_args()
    chosen = [part for part in PARTS if args.only is None or part.name in args.only]
    if args.list:
        print("\n".join(f"{part.name:14} {part.limit_s:4} s  {' '.join(part.words)}" for part in chosen))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.minutes * 60
    for part in chosen:
        if (args.out / f"{part.name}.done").exists():
            said = "done before"
        elif (left_s := end - time.monotonic()) < part.limit_s / 2:
            said = f"not started: {left_s:.0f} s are left, it may take {part.limit_s} s"
        else:
            said = run(part, args.out, args.trl_python, min(part.limit_s, left_s))
        print(f"{part.name}: {said}", flush=True)


if __name__ == "__main__":
    main()
