"""Learner and engine as two processes on one device, through the `Cluster` interface with plain processes: the parts of
a weight transfer, and how fast both are alone and at the same time. Called by cluster.py --device."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from grpo_step import LEARNING_RATE, make_model, make_prompts, reward
from plain_cluster import PlainCluster

from toolwise.cluster.session import running_on
from toolwise.config.schema import RunConfig
from toolwise.messages import Message
from toolwise.training.evaluate import score
from toolwise.training.loop import update_actor
from toolwise.training.run import Run, assemble
from toolwise.types import ScoredRollout, Task

GROUP = 8
WORK = {
    "cpu": {"groups": 4, "learned": 2, "prompt_tokens": 64, "new_tokens": 16, "window_s": 4.0, "cache_mb": 64},
    "cuda": {"groups": 16, "learned": 8, "prompt_tokens": 512, "new_tokens": 256, "window_s": 8.0, "cache_mb": 8000},
}
VERSIONS = 4
PARTS = ("gather", "compare", "seal", "store", "weights")
"""Events of a publication in cluster.jsonl; weights: its way to the worker, and the installation there."""


def config_for(folder: Path, device: str) -> RunConfig:
    work = WORK[device]
    return RunConfig.model_validate(
        {
            "cluster": {"address": "local", "workers": 1, "groups_per_worker": work["groups"]},
            "model": {
                "path": str(folder),
                "device": device,
                "dtype": "float32" if device == "cpu" else "bfloat16",
                **({"threads": 1} if device == "cpu" else {}),
            },
            "data": {"batch_size": work["groups"], "shuffle": False},
            "rollout": {
                "n": GROUP,
                "max_new_tokens": work["new_tokens"],
                "max_batch": 256,
                "cache_mb": work["cache_mb"],
                "tool_parser": "none",
            },
            "multi_turn": {"enable": False},
            "algorithm": {"adv_estimator": "grpo", "zero_std_groups": "keep"},
            "reward": {"function": f"{Path(reward.__code__.co_filename)}:reward", "sandbox": {"tier": "off"}},
            "actor": {
                "lr": LEARNING_RATE,
                "micro_batch_tokens": 1024 if device == "cpu" else 16384,
                "mismatch_check": "off",
            },
            "trainer": {"console": False},
        }
    )


class Sides:
    """What the two processes do, in rounds."""

    def __init__(self, run: Run) -> None:
        self.run, self.label, self.learned = run, 0, 0
        self.scored: list[ScoredRollout] = []

    async def roll_out(self) -> int:
        """Tokens of one batch of groups."""
        self.label += 1
        decisions = self.run.router.decide(next(self.run.batches), GROUP, 0, label=f"round-{self.label}")
        rollouts = [r async for group in self.run.scheduler.groups(decisions) for r in group]
        if not self.scored:
            learned = [r for r in rollouts if r.batch_data_id < WORK[self.device]["learned"]]
            self.scored = await score(self.run, learned, step=0)
        return sum(len(step.tokens.token_ids) for rollout in rollouts for step in rollout.steps)

    @property
    def device(self) -> str:
        return str(self.run.policy.model.device.type)

    async def learn(self) -> int:
        """Tokens of one update, prompts included, as a learner without shared prefixes would count them."""
        await asyncio.to_thread(update_actor, self.run, self.scored, {})
        self.learned += 1
        rows = [step.tokens for s in self.scored for step in s.steps]
        return sum(len(tokens.prompt_ids) + len(tokens.token_ids) for tokens in rows)

    async def publish(self) -> None:
        self.run.policy.version = self.run.learner.version
        await self.run.scheduler.workers.publish(self.run.policy.version)  # type: ignore[attr-defined]


async def rate(work: Callable[[], Awaitable[int]], seconds: float) -> float:
    """Tokens a second of whole rounds in about so many seconds."""
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or not tokens:
        tokens += await work()
    return tokens / (time.perf_counter() - began)


async def both(sides: Sides, seconds: float) -> tuple[float, float]:
    """Of both at the same time: who has its figure goes on until the other has one, too."""
    found: list[float] = []

    async def side(work: Callable[[], Awaitable[int]]) -> float:
        measured = await rate(work, seconds)
        found.append(measured)
        while len(found) < 2:
            await work()
        return measured

    engine, learner = await asyncio.gather(side(sides.roll_out), side(sides.learn))
    return engine, learner


async def transfers(sides: Sides, out: Path, busy: bool) -> dict[str, list[dict[str, Any]]]:
    """Events of some publications, each after an update; `busy`: while the engine samples."""
    path, found = out / "cluster.jsonl", dict[str, list[dict[str, Any]]]()
    for _ in range(VERSIONS):
        await sides.learn()
        start = path.stat().st_size if path.exists() else 0
        sampling = asyncio.create_task(sides.roll_out()) if busy else None
        await asyncio.sleep(0.2 if busy else 0.0)
        began = time.perf_counter()
        await sides.publish()
        whole = time.perf_counter() - began
        if sampling is not None:
            await sampling
        with path.open("rb") as file:
            file.seek(start)
            events = [json.loads(line) for line in file]
        for event in [*events, {"event": "all", "seconds": whole}]:
            found.setdefault(event["event"], []).append(event)
    return found


def show_transfers(title: str, found: dict[str, list[dict[str, Any]]]) -> None:
    texts = []
    for name in (*PARTS, "all"):
        if events := found.get(name):
            seconds = [event["seconds"] for event in events]
            sent = [f"{event['bytes'] / 1e6:.1f}" for event in events if "bytes" in event]
            label = "send+install" if name == "weights" else name
            texts.append(f"{label} {statistics.median(seconds):.3f} s" + (f" ({'/'.join(sent)} MB)" if sent else ""))
    print(f"  {title}: {', '.join(texts)}", flush=True)


async def measure_shape(folder: Path, shape: str, device: str) -> None:
    work, config = WORK[device], config_for(folder, device)
    prompts = make_prompts(folder, 4 * int(work["groups"]), int(work["prompt_tokens"]))
    tasks = [Task(task_id=str(i), prompt=[Message(role="user", content=text)]) for i, text in enumerate(prompts)]
    began = time.perf_counter()
    run, cluster = assemble(config, tasks=tasks, validation_tasks=[]), PlainCluster()
    try:
        with TemporaryDirectory() as name:
            async with running_on(cluster, run, config, Path(name)) as placed:
                sides = Sides(placed)
                print(f"{shape} on {device}: ready in {time.perf_counter() - began:.1f} s, store in {cluster.folder}")
                for _ in range(2):
                    await sides.roll_out()
                    await sides.learn()
                show_transfers("first transfer (whole)", await first(sides, Path(name)))
                window = float(work["window_s"])
                engine, learner = await rate(sides.roll_out, window), await rate(sides.learn, window)
                engine_too, learner_too = await both(sides, window)
                report(engine, learner, engine_too, learner_too)
                show_transfers("transfers, engine idle", await transfers(sides, Path(name), busy=False))
                show_transfers("transfers, engine busy", await transfers(sides, Path(name), busy=True))
                print(f"  pool: {dict(placed.scheduler.workers.pool.counts)}, {memory(device)}")  # type: ignore[attr-defined]
    finally:
        await cluster.close()
        run.close()


async def first(sides: Sides, out: Path) -> dict[str, list[dict[str, Any]]]:
    await sides.publish()
    events = [json.loads(line) for line in (out / "cluster.jsonl").read_bytes().splitlines()]
    return {name: [event for event in events if event["event"] == name] for name in PARTS}


def report(engine: float, learner: float, engine_too: float, learner_too: float) -> None:
    shares = engine_too / engine, learner_too / learner
    print(f"  alone: engine {engine:,.0f} sampled tokens/s, learner {learner:,.0f} tokens/s")
    print(
        f"  together: engine {engine_too:,.0f} ({shares[0]:.0%}), learner {learner_too:,.0f} ({shares[1]:.0%}): both "
        f"do {sum(shares):.2f} x what they do in the same time one after the other",
        flush=True,
    )


def memory(device: str) -> str:
    if device != "cuda":
        return f"load {os.getloadavg()[0]:.1f}"
    return f"peak of the learner's process {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"


def measure_two_processes(device: str, shapes: list[str]) -> None:
    for shape in shapes:
        with TemporaryDirectory() as folder:
            make_model(Path(folder), shape, device)
            asyncio.run(measure_shape(Path(folder), shape, device))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
