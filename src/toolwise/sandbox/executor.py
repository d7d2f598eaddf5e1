"""Executors that score rollouts in a sandbox, with the same arguments for reward functions as `InProcessExecutor`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from toolwise.rewards.episode_rewards import EPISODE_REWARDS, score_episodes
from toolwise.rewards.executor import InProcessExecutor, batch_task_kwargs, run_kwargs, task_kwargs
from toolwise.rewards.function import Reward
from toolwise.sandbox.answers import pack
from toolwise.sandbox.sandbox import Sandbox
from toolwise.sandbox.targets import reference_of
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
    """A `protocols.Executor` over a sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        reference = _reference(reward)
        calls = []
        for r in rollouts:
            kwargs = {**run_kwargs(reward, step, r.prompt_length), **task_kwargs(reward, r.task), **reward.kwargs}
            label = f"step {step}, {r.rollout_id}"
            calls.append({**pack(r.messages, r.task.ground_truth, kwargs), "label": label})
        if reward.mode == "group":
            return await self._evaluate_groups(reference, rollouts, calls)
        batch: dict[str, Any] | None = None
        if reward.mode == "batch":
            kwargs_of_run = run_kwargs(reward, step, [r.prompt_length for r in rollouts])
            batch = {**kwargs_of_run, **batch_task_kwargs(reward, rollouts), **reward.kwargs}
        return await self._run(reference, calls, batch)

    async def _evaluate_groups(
        self, reference: str, rollouts: Sequence[Rollout], calls: Sequence[dict[str, Any]]
    ) -> list[EvaluateResult]:
        """One call per task group, all concurrently; a failure affects only its own group."""
        groups: dict[str, list[int]] = {}
        for index, rollout in enumerate(rollouts):
            groups.setdefault(rollout.group_id, []).append(index)
        group_results = await asyncio.gather(
            *(
                self._run(reference, [calls[i] for i in indices], calls[indices[0]]["kwargs"])
                for indices in groups.values()
            )
        )
        results: dict[int, EvaluateResult] = {}
        for indices, answers in zip(groups.values(), group_results, strict=True):
            results.update(zip(indices, answers, strict=True))
        return [results[index] for index in range(len(rollouts))]

    async def _run(
        self, reference: str, calls: list[dict[str, Any]], batch: dict[str, Any] | None
    ) -> list[EvaluateResult]:
        return await self.sandbox.run_in_thread(lambda: self.sandbox.run_calls(reference, calls, batch, lenient=True))


def _reference(reward: Reward) -> str:
    """The reference by which a worker loads the reward; a function object is located by its file."""
    if reward.reference is not None:
        return reward.reference
    assert reward.function is not None  # a reward has a reference or a function
    return reference_of(reward.function)
