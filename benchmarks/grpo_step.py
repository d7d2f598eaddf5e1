"""Benchmark a whole GRPO step against TRL 1.16: generate, reward, log-probs, loss, backward, optimizer.

    make bench-env                                                TRL in .venv-bench, once
    python benchmarks/grpo_step.py                                CPU, fp32: a random Llama of 0.9 M parameters
    python benchmarks/grpo_step.py --model FOLDER --rounds 1 --steps 1 --warm-up 0      SmolLM2, takes minutes:
                                                                  scripts/make_smollm2.py makes the folder
    python benchmarks/grpo_step.py --only ours
    python benchmarks/grpo_step.py --device cuda --shape 135m     GPU, bf16; --lora 16 trains adapters instead

On a CPU: 8 prompts of about 140 tokens, 4 rollouts each of 64 tokens. On a GPU: 32 prompts of about 850 tokens, 8
rollouts each of 384 tokens. The end of turn is never sampled, so both sides do the same work. Both use the same model
folder, prompts, reward, clip, learning rate and loss (a mean over tokens, no KL, one epoch); no step drops a group.
Ours is `toolwise.training.loop.train_step` on an assembled run, with reward sandbox and mismatch check; theirs is
`GRPOTrainer.train` (grpo_step_trl.py). Each runs in a separate process, alternating for `--rounds`; the first
`--warm-up` steps of each do not count. Memory is the peak of the process above what it had after its imports, with the
sandbox's processes on our side; on a GPU, the peak that torch allocated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shapes import GROUPED_1_6B, SHAPES

WORK = {
    "cpu": {"prompt_count": 8, "group": 4, "new_tokens": 64, "prompt_tokens": 140},
    "cuda": {"prompt_count": 32, "group": 8, "new_tokens": 384, "prompt_tokens": 850},
}
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 1e-6, 0.2, 1.0

HERE = Path(__file__).parent
BENCH_ENV = HERE.parent / ".venv-bench"
SMALL = HERE.parent / "src" / "toolwise" / "models" / "small"
MODELS = {"0.9m": SHAPES["0.9m"], "135m": SHAPES["135m"], "1.6b": GROUPED_1_6B}
WORDS = ["the", "price", "of", "apples", "and", "pears", "in", "seven", "towns", "is", "listed", "below", "add", "them"]


def score(text: str) -> float:
    """A reward that differs between samples."""
    return len(set(text)) / 64


def reward(messages: list[Any], ground_truth: Any = None) -> float:
    return score(messages[-1].content or "")


def memory_mb(field: str) -> float:
    """`VmRSS`, the resident memory of this process, or `VmHWM`, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak_mb(device: str, imports_mb: float) -> float:
    if device == "cpu":
        return memory_mb("VmHWM") - imports_mb
    import torch

    return torch.cuda.max_memory_allocated() / 2**20


def children_mb() -> float:
    """Memory of the child processes, shared pages counted once."""
    found, ids = 0.0, [os.getpid()]
    for parent in ids:
        for task in Path(f"/proc/{parent}/task").iterdir():
            ids += [int(child) for child in (task / "children").read_text().split()]
    for child in ids[1:]:
        lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return found


def make_model(folder: Path, shape: str, device: str) -> None:
    """Random weights with the tokenizer that ships; ids beyond its vocabulary are no text."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(SMALL, trust_remote_code=False)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = LlamaConfig(**MODELS[shape], **ids, max_position_embeddings=4096)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.to(torch.float32 if device == "cpu" else torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(folder: Path, count: int, tokens: int) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer, drawn = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), random.Random(0)

    def one() -> str:
        words = ["List", str(drawn.randrange(1000))]
        while True:
            turn = [{"role": "user", "content": " ".join(words)}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            missing = tokens - len(tokenizer.encode(text, add_special_tokens=False))
            if missing <= 0:
                return " ".join(words)
            words += drawn.choices(WORDS, k=max(1, missing // 2))

    return [one() for _ in range(count)]


def settings(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {
            "path": job["model"],
            "device": job["device"],
            "dtype": "float32" if job["device"] == "cpu" else "bfloat16",
            **job["own_threads"],
        },
        "data": {"batch_size": job["prompt_count"], "shuffle": False},
        "rollout": {
            "n": job["group"],
            "max_new_tokens": job["new_tokens"],
            "engine": "toolwise",
            "tool_parser": "none",
        },
        "multi_turn": {"enable": False},
        "algorithm": {"adv_estimator": "grpo", "zero_std_groups": "keep"},
        "actor": {
            "lr": LEARNING_RATE,
            "clip_ratio_low": CLIP,
            "clip_ratio_high": CLIP,
            "dual_clip": 0.0,
            "max_grad_norm": MAX_GRAD_NORM,
            "loss_aggregation": "token",
            **({} if job["micro_batch"] is None else {"micro_batch_tokens": job["micro_batch"]}),
            "lora": {"rank": job["lora"]},
        },
    }


def ours(job: dict[str, Any]) -> dict[str, Any]:
    for name in ("transformers.models.llama.modeling_llama", "toolwise.learner.builder", "toolwise.policies.local"):
        import_module(name)  # imported before measuring: not part of the step's memory
    from toolwise.concurrency.garbage import frozen_heap
    from toolwise.config.schema import RunConfig
    from toolwise.messages import Message
    from toolwise.training.loop import train_step
    from toolwise.training.run import assemble
    from toolwise.types import Task

    imports = memory_mb("VmRSS")
    tasks = [Task(task_id=str(i), prompt=[Message(role="user", content=text)]) for i, text in enumerate(job["prompts"])]
    run = assemble(RunConfig.model_validate(settings(job)), tasks=tasks, reward=f"{__file__}:reward")
    run.policy.sampling = replace(run.policy.sampling, stop_token_ids=(-1,))  # not a token: nothing ends early
    steps = []

    async def go() -> None:
        for _ in range(job["steps"]):
            cpu, began = time.process_time(), time.perf_counter()
            turn = await train_step(run)
            seconds = time.perf_counter() - began
            rollouts = job["prompt_count"] * job["group"]
            assert turn.metrics["tokens/sampled"] == rollouts * job["new_tokens"], turn.metrics
            assert len(turn.credited) == rollouts
            steps.append(
                {
                    "seconds": seconds,
                    "cpu": time.process_time() - cpu,
                    "generate": turn.metrics["time/rollout_s"],
                    "grad_norm": turn.metrics["actor/grad_norm"],
                }
            )

    with frozen_heap():  # as in a training run
        asyncio.run(go())
    prompt_tokens = sum(len(run.chat.start(task.prompt)) for task in tasks)
    peak, beside = peak_mb(job["device"], imports), children_mb() if job["device"] == "cpu" else 0.0
    run.close()
    return {"steps": steps, "peak_mb": peak, "beside_mb": beside, "imports_mb": imports, "prompt_tokens": prompt_tokens}


def measure(side: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one side in a separate process; its other output goes to stderr."""
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if side == "trl":
        environment["OMP_NUM_THREADS"] = str(job["threads"])
    script = HERE / ("grpo_step.py" if side == "ours" else "grpo_step_trl.py")
    python = sys.executable if side == "ours" else job["trl_python"]
    command = [python, str(script), "--job", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(side: str, rounds: list[dict[str, Any]], warm_up: int) -> dict[str, float]:
    steps = [step for found in rounds for step in found["steps"][warm_up:]]
    seconds = [step["seconds"] for step in steps]
    figures = {
        "best": min(seconds),
        "median": statistics.median(seconds),
        "cpu": min(step["cpu"] for step in steps),
        "generate": statistics.median(step["generate"] for step in steps),
        "slowest": max(seconds),
        "first": max(found["steps"][0]["seconds"] for found in rounds),
        "peak": max(found["peak_mb"] + found.get("beside_mb", 0.0) for found in rounds),
    }
    beside = max(found.get("beside_mb", 0.0) for found in rounds)
    norm = statistics.median(step["grad_norm"] for step in steps)
    print(
        f"{side:5}  best {figures['best']:.2f} s  median {figures['median']:.2f} s  slowest "
        f"{figures['slowest']:.2f} s  first {figures['first']:.1f} s\n"
        f"       CPU {figures['cpu']:.2f} s  generate {figures['generate']:.2f} s  "
        f"peak {figures['peak']:.0f} MiB ({beside:.0f} of it the sandbox's)  "
        f"imports {rounds[0]['imports_mb']:.0f} MiB  gradient {norm:.3g}",
        flush=True,
    )
    return figures


def compare(options: argparse.Namespace, folder: Path) -> None:
    model, steps = options.model, options.warm_up + options.steps
    work = WORK[options.device]
    if model is None:
        model = folder / "model"
        make_model(model, options.shape or ("0.9m" if options.device == "cpu" else "135m"), options.device)
    rows = work["prompt_count"] * work["group"]
    job = {
        **work,
        "model": str(Path(model).resolve()),
        "device": options.device,
        "lora": options.lora,
        "prompts": make_prompts(Path(model), work["prompt_count"] * steps, work["prompt_tokens"]),
        "steps": steps,
        "threads": options.threads,
        "own_threads": {} if options.own_threads is None else {"threads": options.own_threads},
        "micro_batch": options.micro_batch or (1024 if options.device == "cpu" else None),
        "trl_batch": options.trl_batch or (rows if options.device == "cpu" else 16),
        "trl_python": options.trl_python,
    }
    sides = [options.only] if options.only else ["ours", "trl"]
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    loads = []
    for _ in range(options.rounds):
        for side in sides:
            loads.append(os.getloadavg()[0])
            found[side].append(measure(side, job, folder))
    prompt_tokens = {measured["prompt_tokens"] for rounds in found.values() for measured in rounds}
    assert len(prompt_tokens) == 1, f"the two sides did not get the same prompts: {prompt_tokens}"
    print(
        f"{work['prompt_count']} prompts of {prompt_tokens.pop() / len(job['prompts']):.0f} tokens x {work['group']} x "
        f"{work['new_tokens']}, {options.device}, {f'LoRA of rank {options.lora}' if options.lora else 'all weights'}, "
        f"{options.threads} threads, {options.rounds} x {options.steps} steps (load {min(loads):.1f} to "
        f"{max(*loads, os.getloadavg()[0]):.1f})"
    )
    told = {side: report(side, rounds, options.warm_up) for side, rounds in found.items()}
    if len(told) == 2:
        ratios = {name: told["ours"][name] / told["trl"][name] for name in told["ours"]}
        print("ours over TRL's  " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder; a random Llama by default")
    parser.add_argument("--device", choices=list(WORK), default="cpu", help="where both sides run")
    parser.add_argument("--shape", choices=list(MODELS), help="shape of the random model")
    parser.add_argument("--lora", type=int, default=0, help="rank of LoRA adapters; 0: train all weights")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them that do not count")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, alternating between the sides")
    parser.add_argument("--threads", type=int, default=2, help="threads of TRL's side")
    parser.add_argument("--own-threads", type=int, help="threads of our side, instead of its own choice")
    parser.add_argument("--micro-batch", type=int, help="tokens per micro-batch of our side; on a GPU its own choice")
    parser.add_argument("--trl-batch", type=int, help="rows per micro-batch of TRL's side")
    parser.add_argument("--trl-python", default=str(BENCH_ENV / "bin" / "python"), help="Python that has TRL")
    parser.add_argument("--only", choices=("ours", "trl"), help="run only this side")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(ours(json.loads(options.job.read_text()))))
        return
    if options.only != "ours" and not Path(options.trl_python).exists():
        sys.exit("TRL is not installed: run `make bench-env`, or use --only ours")
    with tempfile.TemporaryDirectory() as folder:
        compare(options, Path(folder))


if __name__ == "__main__":
    main()
