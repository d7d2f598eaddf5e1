"""Training runs on a simulated cluster whose workers sample from vLLM servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from async_cases import demo_tasks
from cluster_cases import Workers, cluster_config, train_steps

from toolwise.cluster.launcher import driver_config
from toolwise.cluster.session import running_on
from toolwise.config.schema import RunConfig
from toolwise.engine import Engine
from toolwise.training.loop import StepResult
from toolwise.training.run import assemble

STEPS = 2


def config_for(cluster: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **vllm: Any) -> RunConfig:
    return cluster_config(
        trainer=trainer or {},
        cluster={"address": "local", "workers": 1, **(cluster or {})},
        rollout={"engine": "vllm", "vllm": vllm},
        actor={"lr": 1e-2},
        algorithm={"zero_std_groups": "keep"},
        deterministic=False,
    )


def train(config: RunConfig, out: Path, cluster: Workers, steps: int = STEPS) -> list[StepResult]:
    """As `launch_training` builds a run: the process of the run has no server."""

    async def go() -> list[StepResult]:
        built = assemble(driver_config(config), tasks=demo_tasks(8), validation_tasks=[])
        assert isinstance(built.policy.engine, Engine)
        try:
            async with running_on(cluster, built, config, out) as run:
                return await train_steps(run, steps)
        finally:
            await cluster.close()
            built.close()

    return asyncio.run(go())


def check_learned(results: list[StepResult]) -> None:
    assert all(result.metrics["actor/updates"] for result in results)
    assert all(result.metrics["actor/update_norm"] > 0.01 for result in results)
    assert max(result.metrics["canary/logprob_gap_max"] for result in results) < 1e-3  # else the servers' are old
