"""Executors that score rollouts in a sandbox, with the same arguments for reward functions as `InProcessExecutor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolwise.rewards.episode_rewards import EPISODE_REWARDS, score_episodes
from toolwise.rewards.executor import (
    InProcessExecutor,
    batch_task_kwargs,
    evaluate_groups,
    run_kwargs,
    task_kwargs,
)
from toolwise.rewards.function import Reward
from toolwise.sandbox.answers import pack
from toolwise.sandbox.sandbox import Sandbox
from toolwise.types import EvaluateResult, Rollout


class RewardExecutor:
    """Runs rewards that are loaded in this process here and all others in the sandbox; looks up episode rewards."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self.sandbox = sandbox

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        if reward.reference in EPISODE_REWARDS:
            return score_episodes(reward.reference, rollouts)
        if reward.function is not None:
            on_print = self.sandbox.on_print if self.sandbox is not None else None
            return await InProcessExecutor(on_print).evaluate(reward, rollouts, step=step)
        assert self.sandbox is not None  # a reward given only by reference needs a sandbox
        return await SandboxExecutor(self.sandbox).evaluate(reward, rollouts, step=step)


class SandboxExecutor:
    """A `protocols.Executor` over a sandbox. A function object is located by its file."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        calls = []
        for r in rollouts:
            kwargs = {**run_kwargs(reward, step, r.prompt_length), **task_kwargs(reward, r.task), **reward.kwargs}
            label = f"step {step}, {r.rollout_id}"
            calls.append({**pack(r.messages, r.task.ground_truth, kwargs), "label": label})
        if reward.mode == "group":
            return await evaluate_groups(
                rollouts, lambda group: self._run(reward, [calls[i] for i in group], calls[group[0]]["kwargs"])
            )
        batch: dict[str, Any] | None = None
        if reward.mode == "batch":
            kwargs_of_run = run_kwargs(reward, step, [r.prompt_length for r in rollouts])
            batch = {**kwargs_of_run, **batch_task_kwargs(reward, rollouts), **reward.kwargs}
        return await self._run(reward, calls, batch)

    async def _run(
        self, reward: Reward, calls: list[dict[str, Any]], batch: dict[str, Any] | None
    ) -> list[EvaluateResult]:
        source = reward.reference if reward.reference is not None else reward.function
        assert source is not None  # a reward has a reference or a function
        return await self.sandbox.run_in_thread(lambda: self.sandbox.run_calls(source, calls, batch, lenient=True))
