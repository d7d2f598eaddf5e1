"""Tiny training runs, synchronous and asynchronous, for tests of the two loops."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import make_rows
from toolwise.rewards import reward_function
from toolwise.training.async_loop import AsyncLoop
from toolwise.training.loop import StepResult, train_step
from toolwise.training.run import Run, assemble
from toolwise.types import Task

torch.set_num_threads(1)

ROUTED: Any = {"rollout": {"n": 6, "max_new_tokens": 12}}
PROMPT_ROUTER: Any = {"enable": True, "hidden": 16, "budgets": [{"limit": 0.5}], "calibration": 0.0, "cost": "calls"}
TURN_ROUTER: Any = {**PROMPT_ROUTER, "every": "turn"}
THOUGHTS: Any = {"enable": True, "max_thought_tokens": 8}
GATED: Any = {"gate": "signed", "success_score": 4.0}
PRICED: Any = {"subtract_thinking_cost": True, "budget": {"limit": 2.0}}
FEATURES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gigpo": {"algorithm": {"adv_estimator": "gigpo"}},
    "hgpo": {"algorithm": {"adv_estimator": "hgpo"}},
    "hdpo": {"algorithm": {"adv_estimator": "hdpo"}},
    "critic": {"algorithm": {"adv_estimator": "gae"}},
    "refills": {"algorithm": {"zero_std_groups": "refill", "max_refills": 1}},
    "short batches": {"data": {"batch_size": 3, "drop_last": False}},
    "adapters": {"actor": {"lr": 1e-2, "lora": {"rank": 4}}},
    "thoughts": {"algorithm": {"adv_estimator": "rlvcr", "rlvcr": THOUGHTS}},
    "thoughts, signed gate": {"algorithm": {"adv_estimator": "rlvcr", "rlvcr": {**THOUGHTS, **GATED}}},
    "thoughts, reweighted": {"algorithm": {"adv_estimator": "rlvcr", "rlvcr": {**THOUGHTS, "combine": "reweight"}}},
    "thoughts, gigpo": {"algorithm": {"adv_estimator": "rlvcr", "rlvcr": {**THOUGHTS, "base": "gigpo"}}},
    "thoughts, entropy": {"algorithm": {"adv_estimator": "rlvcr", "rlvcr": {**THOUGHTS, "score": "neg_entropy"}}},
    "thoughts, priced": {"algorithm": {"adv_estimator": "grpo", "rlvcr": {**THOUGHTS, **PRICED}}},
    "router": {**ROUTED, "router": PROMPT_ROUTER},
    "router, sampled": {**ROUTED, "router": {**PROMPT_ROUTER, "sampling": "independent"}},
    "router of turns": {**ROUTED, "router": TURN_ROUTER},
    "router, whole model": {**ROUTED, "router": {**PROMPT_ROUTER, "backbone": "full"}},
    "router, one optimizer": {**ROUTED, "router": {**PROMPT_ROUTER, "optimizer": "actor"}},
    "router alone": {**ROUTED, "router": {**PROMPT_ROUTER, "train_actor": False}},
}
"""What runs with each of the asynchronous loop's modes."""


@reward_function
def by_place(rollouts_messages: list[Any], ground_truths: list[Any]) -> list[float]:
    """Never the same within a group of two, if called for a whole step."""
    return [float(place % 2) for place in range(len(rollouts_messages))]


@reward_function
def all_the_same(messages: Any, ground_truth: Any) -> float:
    return 0.1


@reward_function
def by_length(messages: Any, ground_truth: Any) -> float:
    """Differs within most groups."""
    return float(sum(map(ord, str(messages[-1]))) % 7)


def demo_tasks(count: int) -> list[Task]:
    return [
        Task(
            task_id=str(place),
            prompt=row["prompt"],
            ground_truth=row["reward_model"]["ground_truth"],
            tools_kwargs=row["extra_info"]["tools_kwargs"],
        )
        for place, row in enumerate(make_rows(count, seed=0, split="train"))
    ]


def tiny_run(reward: Any, *, world: Any = None, sampler: Any = None, held_out: int = 0, **sections: Any) -> Run:
    """`world` is a class of environments instead of the tools; `held_out` tasks are validated on."""
    settings: dict[str, Any] = {
        "model": {"device": "cpu"},
        "tools": ["calculator", "search"],
        "data": {"batch_size": 2},
        "rollout": {"n": 2, "max_new_tokens": 12},
        "multi_turn": {"max_turns": 2},
        "actor": {"lr": 1e-3},
        "reward": {"sandbox": {"tier": "off"}},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section} if isinstance(section, dict) else section
    config = RunConfig.model_validate(settings)
    tasks = demo_tasks(8 + held_out)
    return assemble(config, tasks=tasks[:8], validation_tasks=tasks[8:], reward=reward, env=world, sampler=sampler)


def async_run(staleness: int, reward: Any = by_length, *, steps: int = 3, **sections: Any) -> Run:
    trainer = {"mode": "async", "max_staleness": staleness, "total_steps": steps}
    return tiny_run(reward, **{"trainer": trainer, **sections})


def train(run: Run, steps: int) -> list[StepResult]:
    """The next steps, by the loop that the run was built for."""

    async def go() -> list[StepResult]:
        if run.tickets is None:
            return [await train_step(run) for _ in range(steps)]
        loop = AsyncLoop(run)
        try:
            return [await loop.train_step(run) for _ in range(steps)]
        finally:
            await loop.close()

    try:
        return asyncio.run(go())
    finally:
        run.close()
