"""Runs reward functions in this process. Whatever they raise becomes a typed result; the run goes on."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from toolwise.messages import Message
from toolwise.rewards.function import Reward, faulty, read_result, read_results
from toolwise.types import EvaluateResult, Rollout


class InProcessExecutor:
    """The simplest executor: for rewards that the project or the user trusts."""

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        if reward.mode == "batch":
            return await self._evaluate_batch(reward, rollouts, step)
        if reward.mode == "group":
            return await self._evaluate_groups(reward, rollouts, step)
        return list(await asyncio.gather(*(self._evaluate_one(reward, rollout, step) for rollout in rollouts)))

    async def _evaluate_one(self, reward: Reward, rollout: Rollout, step: int) -> EvaluateResult:
        try:
            columns = deepcopy(rollout.task.reward_kwargs)
            given = {"step": step, **columns, **reward.kwargs}
            value = reward(*_copies(rollout), **given)
            return read_result(await value if inspect.isawaitable(value) else value)
        except Exception as fault:  # other people's code: anything may come
            return _fault(fault)

    async def _evaluate_batch(self, reward: Reward, rollouts: Sequence[Rollout], step: int) -> list[EvaluateResult]:
        columns = {name for rollout in rollouts for name in rollout.task.reward_kwargs}
        try:
            by_column = {name: [deepcopy(r.task.reward_kwargs.get(name)) for r in rollouts] for name in sorted(columns)}
            given: dict[str, Any] = {"step": step, **by_column, **reward.kwargs}
            copies = [_copies(rollout) for rollout in rollouts]
            messages, truths = [m for m, _ in copies], [truth for _, truth in copies]
            value = reward(messages, truths, **given)
            return read_results(await value if inspect.isawaitable(value) else value, len(rollouts))
        except Exception as fault:  # likewise
            return [_fault(fault)] * len(rollouts)

    async def _evaluate_groups(self, reward: Reward, rollouts: Sequence[Rollout], step: int) -> list[EvaluateResult]:
        """A call for each task's rollouts; one that fails takes its own group with it and no other."""
        groups: dict[str, list[int]] = {}
        for place, rollout in enumerate(rollouts):
            groups.setdefault(rollout.group_id, []).append(place)
        results: dict[int, EvaluateResult] = {}
        for places in groups.values():
            members = [rollouts[place] for place in places]
            results.update(zip(places, await self._evaluate_group(reward, members, step), strict=True))
        return [results[place] for place in range(len(rollouts))]

    async def _evaluate_group(self, reward: Reward, members: Sequence[Rollout], step: int) -> list[EvaluateResult]:
        task = members[0].task
        try:
            given = {"step": step, **deepcopy(task.reward_kwargs), **reward.kwargs}
            messages = [_copies(member)[0] for member in members]
            value = reward(messages, deepcopy(task.ground_truth), **given)
            return read_results(await value if inspect.isawaitable(value) else value, len(members))
        except Exception as fault:  # likewise
            return [_fault(fault)] * len(members)


def _copies(rollout: Rollout) -> tuple[list[Message], Any]:
    """What a function may change as it likes: the rollouts of a group share one ground truth, and all are kept."""
    return [message.model_copy(deep=True) for message in rollout.messages], deepcopy(rollout.task.ground_truth)


def _fault(fault: Exception) -> EvaluateResult:
    return faulty("exception", f"{type(fault).__name__}: {fault}", traceback.format_exc(limit=-5))
