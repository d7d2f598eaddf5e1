"""Tiny training runs on a simulated cluster whose workers are real, in this process and in real time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from async_cases import demo_tasks

from toolwise.cluster.interface import Payload
from toolwise.cluster.rollout_worker import RolloutWorker
from toolwise.cluster.session import running_on
from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.config.schema import RunConfig
from toolwise.serve.gateway import build_outside_agent
from toolwise.training.async_loop import AsyncLoop
from toolwise.training.loop import StepResult, train_step
from toolwise.training.run import Run, assemble

torch.set_num_threads(1)


def cluster_config(**sections: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "deterministic": True,
        "model": {"device": "cpu"},
        "tools": ["calculator", "search"],
        "data": {"batch_size": 2},
        "rollout": {"n": 3, "max_new_tokens": 12, "temperature": 2.0},
        "multi_turn": {"max_turns": 2},
        "actor": {"lr": 1e-3},
        "reward": {"function": f"{Path(__file__).with_name('async_cases.py')}:by_length", "sandbox": {"tier": "off"}},
        "trainer": {"console": False},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section} if isinstance(section, dict) else section
    return RunConfig.model_validate(settings)


def build(config: RunConfig) -> Run:
    return assemble(config, tasks=demo_tasks(8), validation_tasks=[], agent=build_outside_agent(config))


class Workers(SimulatedCluster):
    """Real rollout workers; `on_call` sees each call before it is made."""

    def __init__(self, weather: Weather | None = None) -> None:
        numbers = count()
        self.built: list[RolloutWorker] = []
        self.on_call: Callable[[Workers, str], None] = lambda cluster, method: None

        def build_worker(payload: Payload) -> RolloutWorker:
            self.built.append(RolloutWorker(f"worker-{next(numbers)}", payload))
            return self.built[-1]

        super().__init__({"rollout": build_worker}, weather or Weather())

    async def call(self, process: Any, method: str, payload: Any, **options: Any) -> Payload:
        self.on_call(self, method)
        return await super().call(process, method, payload, **options)

    async def close(self) -> None:
        await super().close()
        for worker in self.built:
            worker.close()


async def train_steps(run: Run, steps: int) -> list[StepResult]:
    if run.tickets is None:
        return [await train_step(run) for _ in range(steps)]
    loop = AsyncLoop(run)
    try:
        return [await loop.train_step(run) for _ in range(steps)]
    finally:
        await loop.close()


def train_alone(config: RunConfig, steps: int) -> tuple[list[StepResult], str]:
    run = build(config)
    try:
        return asyncio.run(train_steps(run, steps)), run.learner.weights_checksum()
    finally:
        run.close()


def train_together(
    config: RunConfig, steps: int, out: Path, cluster: Workers
) -> tuple[list[StepResult], str, dict[str, int]]:
    """Also what the pool counted."""

    async def go() -> tuple[list[StepResult], str, dict[str, int]]:
        built = build(config)
        try:
            async with running_on(cluster, built, config, out) as run:
                results = await train_steps(run, steps)
                counts = dict(run.scheduler.workers.pool.counts)  # type: ignore[attr-defined]
                return results, run.learner.weights_checksum(), counts
        finally:
            await cluster.close()
            built.close()

    return asyncio.run(go())
