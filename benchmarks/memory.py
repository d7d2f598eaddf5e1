"""Compare the predicted peak of GPU memory (learner/memory_estimate.py) with the measured one.

    python benchmarks/memory.py --device cuda                          a table of 135M, 1.6B, 3B and 8B with LoRA
    python benchmarks/memory.py --device cuda --shape 1.6b --micro-batch-tokens 32768 --optimizer-state cpu
    python benchmarks/memory.py --shape tiny                           on a CPU: that it runs; nothing is measured

Random weights in bf16, and rows of random tokens as in a GRPO step: 32 prompts of 850 tokens, 8 replies of 384 each.
Two updates; the second, which has the optimizer's moments from the start, is measured: its peak
(torch.cuda.max_memory_allocated) and its time. `--cache-mb` adds an engine with a KV cache of that size, allocated.
Each line runs in a process of its own. Needs `src` on the path; the 8B line needs peft.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from shapes import SHAPES

MODELS = {"tiny": SHAPES["0.1m"]} | {name: SHAPES[name] for name in ("135m", "1.6b", "3b", "8b")}
DEFAULT_CASES: list[dict[str, Any]] = [
    {"shape": "135m", "micro_batch_tokens": 32_768},
    {"shape": "1.6b", "micro_batch_tokens": 16_384},
    {"shape": "1.6b", "micro_batch_tokens": 32_768},
    {"shape": "1.6b", "micro_batch_tokens": 32_768, "activation_checkpointing": True},
    {"shape": "1.6b", "micro_batch_tokens": 16_384, "optimizer_state": "bf16"},
    {"shape": "1.6b", "micro_batch_tokens": 16_384, "optimizer_state": "cpu"},
    {"shape": "3b", "micro_batch_tokens": 16_384},
    {"shape": "8b", "micro_batch_tokens": 8_192, "lora_rank": 16},
    {"shape": "8b", "micro_batch_tokens": 16_384, "lora_rank": 16, "activation_checkpointing": True},
]


def build_model(shape: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**MODELS[shape], max_position_embeddings=8192), dtype=torch.bfloat16
        )
    return model.eval()


def build_rollouts(options: argparse.Namespace, vocabulary: int) -> list[Any]:
    """One turn each; the replies of a group share their prompt."""
    from toolwise.messages import Message
    from toolwise.types import (
        AnnotatedRollout,
        CreditedRollout,
        EvaluateResult,
        Rollout,
        ScoredRollout,
        StepData,
        StopReason,
        Task,
        Usage,
    )

    rng = random.Random(0)
    credited = []
    for group in range(options.prompts):
        prompt = [rng.randrange(vocabulary) for _ in range(options.prompt_tokens)]
        for place in range(options.group):
            reply = [rng.randrange(vocabulary) for _ in range(options.reply_tokens)]
            step = StepData(
                system_step_index=0,
                observation_data=None,
                action_taken={"type": "text"},
                resulting_messages_history=[],
                policy_logprobs={"prompt_ids": prompt, "token_ids": reply, "logprobs": [-10.0] * len(reply)},
            )
            task = Task(task_id=str(group), prompt=[Message(role="user", content="?")])
            name = f"{group}/{place}"
            rollout = Rollout(
                name, str(group), group, place, task, None, (step,), task.prompt, StopReason.ANSWERED, Usage()
            )
            scored = ScoredRollout(rollout, EvaluateResult(score=float(place % 2)), (step,))
            advantages = np.full(len(reply), 1.0 if place % 2 else -1.0, np.float32)
            credited.append(CreditedRollout(AnnotatedRollout(scored), (step,), (advantages,)))
    return credited


def run_case(options: argparse.Namespace) -> dict[str, Any]:
    from toolwise.config.schema import RunConfig
    from toolwise.engine import Engine
    from toolwise.learner.actor import Actor
    from toolwise.learner.memory_estimate import update_memory

    config = RunConfig.model_validate(
        {
            "actor": {
                "lr": 1e-6,
                "mismatch_check": "off",
                "micro_batch_tokens": options.micro_batch_tokens,
                "activation_checkpointing": options.activation_checkpointing,
                "optimizer_state": options.optimizer_state,
                "lora": {"rank": options.lora_rank},
            }
        }
    )
    on_gpu = options.device.startswith("cuda")
    model = build_model(options.shape, options.device)
    actor = Actor(model, config)
    cache = 0
    if options.cache_mb:
        engine = Engine(model, memory_mb=options.cache_mb)
        engine.runner.allocate(engine.blocks.count)
        cache = engine.blocks.count * engine.runner.block_bytes
    rollouts = build_rollouts(options, MODELS[options.shape]["vocab_size"])
    rows = sum(options.prompt_tokens + options.group * options.reply_tokens for _ in range(options.prompts))
    predicted = update_memory(model, actor.optimizer, config.actor, min(options.micro_batch_tokens, rows))
    for _ in range(2):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        metrics = actor.update(rollouts)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return {
        "model": options.shape + (f" LoRA {options.lora_rank}" if options.lora_rank else ""),
        "micro_batch_tokens": options.micro_batch_tokens,
        "checkpointing": options.activation_checkpointing,
        "state": options.optimizer_state,
        "predicted": predicted.peak + cache,
        "measured": torch.cuda.max_memory_allocated() if on_gpu else None,
        "seconds": seconds,
        "computed_tokens": metrics["actor/computed_tokens"],
        "retries": metrics.get("actor/out_of_memory", 0.0),
        "parts": predicted.parts() | ({"KV cache": cache} if cache else {}),
    }


def print_table(lines: list[dict[str, Any]]) -> None:
    print(
        "| model | micro-batch | recompute | state | predicted GiB | measured | error | update s | tokens/s | parts |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        if "failed" in line:
            print(f"| {line['failed']} |")
            continue
        predicted, measured = line["predicted"] / 2**30, line["measured"]
        found = "– | –" if measured is None else f"{measured / 2**30:.1f} | {predicted * 2**30 / measured - 1:+.1%}"
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in line["parts"].items())
        note = f" ({line['retries']:.0f} retries)" if line["retries"] else ""
        print(
            f"| {line['model']} | {line['micro_batch_tokens']:,}{note} | {'yes' if line['checkpointing'] else 'no'} | "
            f"{line['state']} | {predicted:.1f} | {found} | {line['seconds']:.2f} | "
            f"{line['computed_tokens'] / line['seconds']:,.0f} | {parts} |"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=list(MODELS))
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--optimizer-state", choices=["fp32", "bf16", "cpu"], default="fp32")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--cache-mb", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=850)
    parser.add_argument("--reply-tokens", type=int, default=384)
    parser.add_argument("--json", action="store_true", help="print one case as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.json:
        print(json.dumps(run_case(options)))
        return
    cases = DEFAULT_CASES if options.shape is None else [{}]
    given = [word for word in sys.argv[1:] if word != "--json"]
    lines = []
    for case in cases:
        words = [*given]
        for name, value in case.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        ended = subprocess.run([sys.executable, __file__, *words, "--json"], capture_output=True, text=True)
        if ended.returncode:
            lines.append({"failed": f"{' '.join(words)}: {ended.stderr.strip().splitlines()[-1]}"})
        else:
            lines.append(json.loads(ended.stdout.splitlines()[-1]))
        print(f"{' '.join(words)}: done", file=sys.stderr)
    print_table(lines)


if __name__ == "__main__":
    main()
