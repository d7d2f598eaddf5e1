"""Benchmark supervised fine-tuning: tokens per second of whole steps (pack, forward, backward, optimizer).

    python benchmarks/sft.py --device cuda                          135M (SmolLM2's shape, random weights), bf16
    python benchmarks/sft.py --device cuda --model 1.6B
    python benchmarks/sft.py --device cuda --model FOLDER --lora-rank 16
    python benchmarks/sft.py --model small --tokens 8192 --steps 5   the model that ships, on a CPU, fp32

Runs `toolwise.learner.supervised.sft_steps`, the loop of `toolwise sft`, on random conversations of different lengths;
`--assistant` of their tokens are trained on. Each step ends when its metrics are read, so the times include waiting for
the device; the next step is packed meanwhile. Needs torch, transformers and numpy, and `src` on the path.

MFU counts 6 FLOP per weight and token, against the fastest matrix product measured on this machine just before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "src"), str(Path(__file__).resolve().parent)]

from update import MODELS, build_model, device_name, flops, forget_peak, matmul_peak, peak_mib  # noqa: E402

from toolwise.config.sft import SftConfig  # noqa: E402
from toolwise.learner.conversations import Example  # noqa: E402
from toolwise.learner.supervised import sft_steps  # noqa: E402


def load(name: str, device: str, dtype: torch.dtype) -> Any:
    if name.lower() in (*MODELS, "small"):
        return build_model(name.lower(), device, dtype)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False).to(device).eval()


def conversations(options: argparse.Namespace, vocabulary: int) -> list[Example]:
    """Enough for all steps, so that no two steps see the same; lengths vary between a quarter and 7/4 of the mean."""
    rng = np.random.default_rng(options.seed)
    system = rng.integers(0, vocabulary, options.system)
    wanted, made, rows = options.tokens * (options.warm_up + options.steps), 0, []
    while made < wanted:
        length = int(rng.integers(options.length // 4, options.length * 7 // 4 + 1))
        ids = rng.integers(0, vocabulary, max(2, length))
        ids[: len(system)] = system[: len(ids)]
        # Two turns: the assistant writes the end of each half.
        place = np.arange(len(ids)) % -(-len(ids) // 2)
        rows.append(Example(ids.astype(np.int32), place >= (1 - options.assistant) * len(ids) / 2))
        made += len(ids)
    return rows


def measure(model: Any, rows: list[Example], options: argparse.Namespace) -> list[dict[str, float]]:
    steps = options.warm_up + options.steps
    config = SftConfig.model_validate(
        {
            "steps": steps,
            "batch_tokens": -(-sum(map(len, rows)) // steps),  # one epoch: at least --tokens a step on average
            "lr": 1e-6,
            "seed": options.seed,
            "micro_batch_tokens": options.micro_batch,
            "activation_checkpointing": options.checkpointing,
            "lora": {"rank": options.lora_rank},
        }
    )
    found: list[dict[str, float]] = []
    began = time.perf_counter()
    for metrics in sft_steps(model, rows, config):
        now = time.perf_counter()
        found.append({**metrics, "seconds": now - began})
        if len(found) == options.warm_up:
            forget_peak(options.device)
        began = time.perf_counter()
    return found


def report(model: Any, steps: list[dict[str, float]], peak: float, options: argparse.Namespace) -> dict[str, Any]:
    timed = steps[options.warm_up :]
    speeds = [step["all_tokens"] / step["seconds"] for step in timed]
    by_weights, done = zip(*(flops(model, int(s["computed_tokens"]), int(s["tokens"])) for s in timed), strict=True)
    seconds = sum(step["seconds"] for step in timed)
    return {
        "tokens_per_s": round(statistics.median(speeds)),
        "slowest": round(min(speeds)),
        "fastest": round(max(speeds)),
        "step_s": round(statistics.median(step["seconds"] for step in timed), 4),
        "first_step_s": round(steps[0]["seconds"], 2),
        "tokens_per_step": round(statistics.mean(step["all_tokens"] for step in timed)),
        "trained_per_step": round(statistics.mean(step["tokens"] for step in timed)),
        "mfu_6n": round(sum(by_weights) / seconds / peak, 4),
        "mfu_done": round(sum(done) / seconds / peak, 4),
        "peak_mib": round(peak_mib(options.device)),
        "loss": round(timed[-1]["loss"], 4),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="135M", help="135M, 1.6B, small, or a model folder")
    parser.add_argument("--device", default="cpu", help="cuda or cpu")
    parser.add_argument("--dtype", help="torch dtype (default: bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--tokens", type=int, default=65_536, help="packed tokens per step, at least (on average)")
    parser.add_argument("--length", type=int, default=1024, help="mean tokens of a conversation")
    parser.add_argument("--system", type=int, default=0, help="tokens that all conversations share at the start")
    parser.add_argument("--assistant", type=float, default=0.4, help="share of the tokens that is trained on")
    parser.add_argument("--micro-batch", type=int, help="tokens per pass (default: chosen by memory)")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank")
    parser.add_argument("--checkpointing", action="store_true", help="use activation checkpointing")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them that do not count")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--out", type=Path, help="append the result as a line of JSON")
    options = parser.parse_args()
    if options.warm_up < 1:
        parser.error("--warm-up must be at least 1: the first step compiles kernels")
    dtype = getattr(torch, options.dtype or ("float32" if options.device == "cpu" else "bfloat16"))
    peak = matmul_peak(options.device, dtype)
    model = load(options.model, options.device, dtype)
    weights = sum(weight.numel() for weight in model.parameters())
    print(
        f"{options.model}: {weights / 1e6:,.0f} M weights, {str(dtype).removeprefix('torch.')}, torch "
        f"{torch.__version__}, {device_name(options.device)}, {torch.get_num_threads()} threads, matmul peak "
        f"{peak / 1e12:.2f} TFLOP/s, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    rows = conversations(options, int(model.config.get_text_config().vocab_size))
    found = report(model, measure(model, rows, options), peak, options)
    print(
        f"median {found['tokens_per_s']:,} tokens/s ({found['slowest']:,} to {found['fastest']:,}), "
        f"{found['tokens_per_step']:,} tokens a step in {found['step_s']:.3f} s, MFU {found['mfu_6n']:.1%} "
        f"({found['mfu_done']:.1%} of products done), peak {found['peak_mib']:,} MiB, first step "
        f"{found['first_step_s']:.1f} s, load {found['load_average']}"
    )
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    line = json.dumps({"options": given, "matmul_tflops": round(peak / 1e12, 2), **found})
    print(line)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
