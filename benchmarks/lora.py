"""Benchmark LoRA against full training: memory of weights, gradients and optimiser, update, generation, whole step.

    python benchmarks/lora.py --device cuda                  a random model of 1.6B parameters, bf16
    python benchmarks/lora.py --device cuda --shape 135m
    python benchmarks/lora.py --steps 1 --prompts 2 --group 2 --prompt-tokens 60 --new-tokens 16     CPU, seconds

Each form is `toolwise.training.loop.train_step` on an assembled run, in a separate process: the same random model,
prompts, reward, cache size and micro-batch. The end of turn is never sampled, so both do the same work. The first
`--warm-up` steps do not count. Bytes are counted on the tensors that are there when the optimiser steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapes import GROUPED_1_6B, SHAPES

HERE = Path(__file__).parent
SMALL = HERE.parent / "src" / "toolwise" / "models" / "small"
MODELS = {"tiny": SHAPES["0.9m"]} | {name: SHAPES[name] for name in ("135m", "1.6b", "8b")}
MODELS["1.6b-grouped"] = GROUPED_1_6B
ROWS = {
    "weights": ("weights, with merged copies", "GB", None),
    "gradients": ("gradients", "GB", None),
    "optimizer": ("optimiser, with fp32 masters", "GB", None),
    "bytes": ("weights + gradients + optimiser", "GB", 0.35),
    "update": ("update", "s", 0.8),
    "generate": ("generation", "s", None),
    "step": ("whole step", "s", 0.9),
    "peak": ("peak memory", "GB", None),
}
"""Figure -> its name in the table, its unit, and the largest ratio of LoRA to full training that is aimed at."""
WORDS = ["the", "price", "of", "apples", "and", "pears", "in", "seven", "towns", "is", "listed", "below", "add", "them"]


def reward(messages: list[Any], ground_truth: Any = None) -> float:
    """A reward that differs between samples."""
    return len(set(messages[-1].content or "")) / 64


def make_model(folder: Path, options: argparse.Namespace) -> None:
    """Random weights with the tokenizer that ships."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(SMALL, trust_remote_code=False)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape = {"tie_word_embeddings": True, "max_position_embeddings": 4096} | MODELS[options.shape]
    torch.manual_seed(0)
    with torch.device(options.device):
        model = LlamaForCausalLM(LlamaConfig(**shape, **ids)).to(getattr(torch, options.dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(count: int, tokens: int) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer, drawn = AutoTokenizer.from_pretrained(SMALL, trust_remote_code=False), random.Random(0)
    prompts = []
    for _ in range(count):
        words = ["List", str(drawn.randrange(1000)), *drawn.choices(WORDS, k=tokens)]
        ids = tokenizer.encode(" ".join(words), add_special_tokens=False)[:tokens]
        prompts.append(tokenizer.decode(ids))
    return prompts


def settings(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"path": job["model"], "device": job["device"], "dtype": job["dtype"]},
        "data": {"batch_size": job["prompts_per_step"], "shuffle": False},
        "rollout": {
            "n": job["group"],
            "max_new_tokens": job["new_tokens"],
            "max_batch": job["prompts_per_step"] * job["group"],
            "tool_parser": "none",
            "cache_mb": job["cache_mb"],
        },
        "multi_turn": {"enable": False},
        "algorithm": {"adv_estimator": "grpo", "zero_std_groups": "keep"},
        "reward": {"sandbox": {"tier": "off"}},
        "actor": {
            "lr": 1e-5 if job["rank"] else 1e-6,
            "micro_batch_tokens": job["micro_batch"],
            "lora": {"rank": job["rank"]},
        },
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run one form in this process."""
    import torch

    from toolwise.config.schema import RunConfig
    from toolwise.messages import Message
    from toolwise.training.loop import train_step
    from toolwise.training.run import assemble
    from toolwise.types import Task

    tasks = [Task(task_id=str(i), prompt=[Message(role="user", content=text)]) for i, text in enumerate(job["prompts"])]
    run = assemble(RunConfig.model_validate(settings(job)), tasks=tasks, reward=f"{__file__}:reward")
    run.policy.sampling = replace(run.policy.sampling, stop_token_ids=(-1,))  # not a token: nothing ends early
    held = watch_memory(run.learner)
    steps: list[dict[str, float]] = []

    async def go() -> None:
        for number in range(job["steps"]):
            if number == job["warm_up"] and job["device"] != "cpu":
                torch.cuda.reset_peak_memory_stats()
            began = now(job["device"])
            metrics = (await train_step(run)).metrics
            seconds = now(job["device"]) - began
            expected = job["prompts_per_step"] * job["group"] * job["new_tokens"]
            assert metrics["tokens/sampled"] == expected, metrics
            assert metrics["actor/updates"] == 1.0, metrics
            steps.append(
                {
                    "step": seconds,
                    "update": metrics["time/update_s"],
                    "generate": metrics["time/rollout_s"],
                    "gap": metrics["canary/logprob_gap_mean"],
                }
            )

    asyncio.run(go())
    peak = (
        torch.cuda.max_memory_allocated()
        if job["device"] != "cpu"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    engine: Any = run.policy.engine
    run.close()
    return {"steps": steps, "peak": peak, "runner": type(engine.runner).__name__, **held}


def watch_memory(actor: Any) -> dict[str, int]:
    """Bytes of what the actor holds, filled in when its optimiser steps; each piece of memory counts once."""
    from toolwise.models.merged_weights import merged_copy

    held: dict[str, int] = {}
    optimizer, step = actor.optimizer, actor.optimizer.step

    def counted(*arguments: Any, **named: Any) -> Any:
        tensors = [*actor.model.parameters(), *merged_copy(actor.model).parameters()]
        held["weights"] = size(tensors)
        held["gradients"] = size(p.grad for p in {*optimizer.masters, *optimizer.weights} if p.grad is not None)
        result = step(*arguments, **named)
        masters = [m for w, m in zip(optimizer.weights, optimizer.masters, strict=True) if w is not m]
        state = [value for moments in optimizer.adamw.state.values() for value in moments.values()]
        held["optimizer"] = size([*masters, *(value for value in state if hasattr(value, "untyped_storage"))])
        return result

    optimizer.step = counted
    return held


def size(tensors: Iterable[Any]) -> int:
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def now(device: str) -> float:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def run_form(job: dict[str, Any], folder: Path) -> dict[str, float]:
    """Run one form in a separate process and return its figures, medians over the steps that count."""
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    command = [sys.executable, __file__, "--job", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    found = json.loads(done.stdout.splitlines()[-1])
    steps = found.pop("steps")[job["warm_up"] :]
    figures = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    print(json.dumps({"rank": job["rank"], **found, **figures, "slowest": max(s["step"] for s in steps)}), flush=True)
    figures |= {name: found[name] for name in ("weights", "gradients", "optimizer", "peak")}
    figures["bytes"] = found["weights"] + found["gradients"] + found["optimizer"]
    return figures


def show(full: dict[str, float], lora: dict[str, float], rank: int) -> None:
    print(f"\n| | full | LoRA, rank {rank} | ratio | aim |\n|---|---:|---:|---:|---:|")
    for key, (name, unit, aim) in ROWS.items():
        scale = 1e9 if unit == "GB" else 1.0
        values = f"{full[key] / scale:.2f} {unit} | {lora[key] / scale:.2f} {unit}"
        print(f"| {name} | {values} | {lora[key] / full[key]:.2f} | {'' if aim is None else f'≤ {aim:g}'} |")
    print(f"| mean log-prob gap of engine and learner | {full['gap']:.1e} | {lora['gap']:.1e} | | |")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtype", help="torch dtype; bfloat16 on a GPU, float32 on a CPU by default")
    parser.add_argument("--shape", choices=list(MODELS), help="model shape; 1.6b on a GPU, tiny on a CPU by default")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters, in all linear layers")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="rollouts per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=850, help="tokens per prompt, about")
    parser.add_argument("--new-tokens", type=int, default=384, help="tokens per rollout")
    parser.add_argument("--cache-mb", type=int, default=16_000, help="rollout.cache_mb")
    parser.add_argument("--micro-batch", type=int, default=16_384, help="actor.micro_batch_tokens")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them that do not count")
    parser.add_argument("--only", choices=("full", "lora"), help="run only this form")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.shape = options.shape or ("tiny" if options.device == "cpu" else "1.6b")
    return options


def main() -> None:
    options = read_options()
    if options.job is not None:
        print(json.dumps(measure(json.loads(options.job.read_text()))))
        return
    with tempfile.TemporaryDirectory() as folder:
        steps = options.warm_up + options.steps
        make_model(Path(folder) / "model", options)
        job = {
            "model": str(Path(folder) / "model"),
            "prompts": make_prompts(options.prompts * steps, options.prompt_tokens),
            "prompts_per_step": options.prompts,
            "steps": steps,
            "warm_up": options.warm_up,
            **{name: getattr(options, name) for name in ("device", "dtype", "group", "new_tokens", "cache_mb")},
            "micro_batch": options.micro_batch,
        }
        print(json.dumps({name: value for name, value in vars(options).items() if name != "job"}))
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
        ranks = {"full": 0, "lora": options.rank}
        forms = [options.only] if options.only else list(ranks)
        found = {form: run_form({**job, "rank": ranks[form]}, Path(folder)) for form in forms}
        if len(found) == 2:
            show(found["full"], found["lora"], options.rank)


if __name__ == "__main__":
    main()
