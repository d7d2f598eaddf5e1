"""What a checkpoint adds to a training step, written beside the training and written while it waits.

    python benchmarks/checkpoints.py --device cuda --shape 1.6b --steps 9          saves 22 GB in every third step
    python benchmarks/checkpoints.py --shape tiny --steps 6 --prompts 2 --group 2 --prompt-tokens 40 --reply-tokens 8

A step generates replies with the engine and updates the actor, as `training/loop.py` does; random weights in bf16,
random prompts. A checkpoint holds what a run's does but for the small files: weights, master weights, moments. Printed:
steps without a save; the step after a save, with the time the training had to wait for the copy and for the save
before it; and how long the thread took to write it. Needs `src` on the path, and space for two checkpoints in `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from memory import MODELS, build_model, build_rollouts

from toolwise.config.schema import RunConfig
from toolwise.engine import Engine
from toolwise.learner.actor import Actor
from toolwise.protocols import Sampling
from toolwise.training.checkpoint import save, tensor_bytes
from toolwise.training.checkpoint.background import BackgroundSaver


class Run:
    def __init__(self, options: argparse.Namespace, folder: Path, *, background: bool) -> None:
        actor = {"lr": 1e-6, "mismatch_check": "off", "micro_batch_tokens": options.micro_batch_tokens}
        self.options, self.folder = options, folder
        self.model = build_model(options.shape, options.device)
        self.actor = Actor(self.model, RunConfig.model_validate({"actor": actor}))
        self.engine = Engine(self.model, memory_mb=options.cache_mb)
        self.rollouts = build_rollouts(options, MODELS[options.shape]["vocab_size"])
        self.saver = BackgroundSaver(background=background)
        self.saved_bytes = 0
        self.write_s: list[float] = []

    def step(self) -> float:
        start = time.perf_counter()
        asyncio.run(self.generate())
        self.saver.wait_for_copy()
        self.actor.update(self.rollouts)
        self.engine.weights_changed(self.actor.version)
        if self.options.device.startswith("cuda"):
            torch.cuda.synchronize()
        self.saver.take_result(wait=False)
        return time.perf_counter() - start

    async def generate(self) -> None:
        rng, vocabulary = random.Random(self.actor.version), MODELS[self.options.shape]["vocab_size"]
        sampling = Sampling(max_new_tokens=self.options.reply_tokens)
        prompts = [
            [rng.randrange(vocabulary) for _ in range(self.options.prompt_tokens)] for _ in range(self.options.prompts)
        ]
        await asyncio.gather(
            *(self.engine.generate(prompt, sampling) for prompt in prompts for _ in range(self.options.group))
        )

    def save(self) -> None:
        self.saver.take_result(wait=True)
        state = {"parts": {"actor": self.actor.state_dict()}, "weights": self.actor.weights_to_save()}
        self.saved_bytes = tensor_bytes(state)

        def write(copied: Any, abandoned: Any) -> Any:
            start = time.perf_counter()
            extra = {"model": lambda folder: self.actor.save_model(folder, dict(copied["weights"]))}
            saved = save(
                self.folder, self.actor.version, copied["parts"], extra_files=extra, keep_last=1, abandoned=abandoned
            )
            self.write_s.append(time.perf_counter() - start)
            return saved

        self.saver.start(state, write)


def measure(options: argparse.Namespace, *, background: bool) -> None:
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        run = Run(options, Path(folder), background=background)
        for _ in range(2):
            run.step()  # compilation, graphs, moments
        plain, after, waits = [], [], []
        for step in range(options.steps):
            saves = step % 3 == 2
            run.saver.take_metrics()
            start = time.perf_counter()
            if saves:
                run.save()
            run.step()
            (after if saves else plain).append(time.perf_counter() - start)
            if saves:
                waits.append(run.saver.take_metrics())
        run.saver.take_result(wait=True)
    base = statistics.median(plain)
    print(f"{'beside the training' if background else 'training waits'}: {run.saved_bytes / 1e9:.2f} GB")
    print(f"  step without a save  {base:.3f} s (median of {len(plain)})")
    for seconds, times, write_s in zip(after, waits, run.write_s, strict=True):
        waited = ", ".join(f"{name.removeprefix('time/checkpoint_')} {value:.3f}" for name, value in times.items())
        more = f"{seconds / base - 1:+.1%}"
        print(f"  step with a save     {seconds:.3f} s ({more}); waited: {waited}; wrote for {write_s:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=list(MODELS), default="tiny")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--cache-mb", type=int, default=None)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=850)
    parser.add_argument("--reply-tokens", type=int, default=384)
    parser.add_argument("--out", default=None, help="folder for the checkpoints; default: the temporary one")
    parser.add_argument("--only", choices=["async", "sync"])
    options = parser.parse_args()
    for name in ("async", "sync"):
        if options.only in (None, name):
            measure(options, background=name == "async")


if __name__ == "__main__":
    main()
