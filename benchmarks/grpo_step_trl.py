"""TRL 1.16's side of grpo_step.py, run in .venv-bench: `GRPOTrainer.train` with a clock around each step.

It uses TRL's defaults except for what must be the same on both sides, and two settings that only cost time: activation
checkpointing is off, and on a CPU all rows of a step are computed at once unless `--trl-batch` is smaller. On a GPU it
trains fp32 weights under bf16 autocast, its own default for `bf16`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.models.llama.modeling_llama
from datasets import Dataset
from grpo_step import CLIP, LEARNING_RATE, MAX_GRAD_NORM, memory_mb, peak_mb, score
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Times each step, from its start to after the optimizer step."""

    def __init__(self, new_tokens: int) -> None:
        self.new_tokens = new_tokens
        self.steps: list[dict[str, float]] = []
        self.began = self.cpu = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append({"seconds": time.perf_counter() - self.began, "cpu": time.process_time() - self.cpu})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "grad_norm" in logs:
            assert logs["completions/mean_length"] == self.new_tokens, logs
            self.steps[-1]["grad_norm"] = float(logs["grad_norm"])


class TimedTrainer(GRPOTrainer):
    generate_seconds: list[float]
    prompt_tokens = 0

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        rolled_out = super()._generate(prompts)
        self.generate_seconds.append(time.perf_counter() - began)
        self.prompt_tokens += sum(map(len, rolled_out[0]))
        return rolled_out


def reward(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    return [score(completion[-1]["content"]) for completion in completions]


def theirs(job: dict[str, Any], folder: str) -> dict[str, Any]:
    cpu = job["device"] == "cpu"
    if cpu:
        torch.set_num_threads(job["threads"])
    imports = memory_mb("VmRSS")
    model = AutoModelForCausalLM.from_pretrained(job["model"], trust_remote_code=False, dtype=torch.float32)
    rows = job["prompt_count"] * job["group"]
    settings = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job["trl_batch"],
        gradient_accumulation_steps=rows // job["trl_batch"],
        num_generations=job["group"],
        max_steps=job["steps"],
        max_completion_length=job["new_tokens"],
        generation_kwargs={"min_new_tokens": job["new_tokens"]},
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        epsilon=CLIP,
        beta=0.0,
        loss_type="dapo",
        use_cpu=cpu,
        bf16=not cpu,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in job["prompts"]])
    clock = Clock(job["new_tokens"])
    trainer = TimedTrainer(
        model,
        reward_funcs=reward,
        args=settings,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(job["model"], trust_remote_code=False),
        callbacks=[clock],
        peft_config=LoraConfig(r=job["lora"], target_modules="all-linear") if job["lora"] else None,
    )
    trainer.generate_seconds = []
    trainer.train()
    assert len(clock.steps) == len(trainer.generate_seconds) == job["steps"]
    for step, seconds in zip(clock.steps, trainer.generate_seconds, strict=True):
        step["generate"] = seconds
    return {
        "steps": clock.steps,
        "peak_mb": peak_mb(job["device"], imports),
        "imports_mb": imports,
        "prompt_tokens": trainer.prompt_tokens // job["group"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="JSON file written by grpo_step.py")
    job = json.loads(parser.parse_args().job.read_text())
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        figures = theirs(job, folder)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
