"""Runs reward functions in this process. Whatever they raise becomes a typed result; the run goes on."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, Protocol

from toolwise.concurrency.tasks import spawn
from toolwise.messages import Message
from toolwise.rewards.function import Reward, fault_result, read_result, read_results
from toolwise.rewards.printed_output import PrintCallback, capture_prints, tee_output
from toolwise.rewards.result_bounds import truncate_result
from toolwise.rewards.signature import TASK_FIELDS
from toolwise.types import EvaluateResult, Rollout, Task
from toolwise.untrusted import user_code

MAX_CONCURRENT_CALLS = 256
"""Async calls that are under way at the same time, at most."""


class Executor(Protocol):
    """Where reward functions run: in this process, or in a sandbox. One result a rollout, in order, always."""

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]: ...


class InProcessExecutor:
    """The simplest executor: for rewards that the project or the user trusts. Async calls overlap.

    `printed` is told what they print, which goes to the terminal as well.
    """

    def __init__(self, on_print: PrintCallback | None = None) -> None:
        self._on_print = on_print

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        with tee_output() if self._on_print is not None else nullcontext():
            if reward.mode == "batch":
                return await self._evaluate_batch(reward, rollouts, step)
            if reward.mode == "group":
                return await self._evaluate_groups(reward, rollouts, step)
            free = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
            return list(await asyncio.gather(*(spawn(self._evaluate_one(reward, r, step, free)) for r in rollouts)))

    async def _evaluate_one(
        self, reward: Reward, rollout: Rollout, step: int, free: asyncio.Semaphore
    ) -> EvaluateResult:
        async with free:
            with capture_prints(f"step {step}, {rollout.rollout_id}", self._on_print):
                try:
                    columns = deepcopy(task_kwargs(reward, rollout.task))
                    given = {**run_kwargs(reward, step, rollout.prompt_length), **columns, **reward.kwargs}
                    value = reward(*_copy_inputs(rollout), **given)
                    return read_result(await value if inspect.isawaitable(value) else value)
                except BaseException as fault:  # other people's code: anything may come
                    return _exception_result(fault)

    async def _evaluate_batch(self, reward: Reward, rollouts: Sequence[Rollout], step: int) -> list[EvaluateResult]:
        by_column = run_kwargs(reward, step, [rollout.prompt_length for rollout in rollouts])
        try:
            for name, values in batch_task_kwargs(reward, rollouts).items():
                by_column[name] = [deepcopy(value) for value in values]
            truths = [deepcopy(rollout.task.ground_truth) for rollout in rollouts]
        except BaseException as fault:  # likewise: a column's own copy
            return [_exception_result(fault)] * len(rollouts)
        return await self._evaluate_many(reward, rollouts, truths, by_column, step)

    async def _evaluate_groups(self, reward: Reward, rollouts: Sequence[Rollout], step: int) -> list[EvaluateResult]:
        """A call for each task's rollouts; one that fails takes its own group with it and no other."""
        groups: dict[str, list[int]] = {}
        for place, rollout in enumerate(rollouts):
            groups.setdefault(rollout.group_id, []).append(place)
        done = await asyncio.gather(
            *(spawn(self._evaluate_group(reward, [rollouts[p] for p in places], step)) for places in groups.values())
        )
        results: dict[int, EvaluateResult] = {}
        for places, found in zip(groups.values(), done, strict=True):
            results.update(zip(places, found, strict=True))
        return [results[place] for place in range(len(rollouts))]

    async def _evaluate_group(self, reward: Reward, members: Sequence[Rollout], step: int) -> list[EvaluateResult]:
        task = members[0].task
        try:
            given = {**run_kwargs(reward, step, members[0].prompt_length), **deepcopy(task_kwargs(reward, task))}
            truth = deepcopy(task.ground_truth)
        except BaseException as fault:  # likewise
            return [_exception_result(fault)] * len(members)
        return await self._evaluate_many(reward, members, truth, given, step)

    async def _evaluate_many(
        self, reward: Reward, rollouts: Sequence[Rollout], truth: Any, given: dict[str, Any], step: int
    ) -> list[EvaluateResult]:
        """One call for all of `rollouts`, which fails for all of them."""
        more = f" and {len(rollouts) - 1} more" if len(rollouts) > 1 else ""
        with capture_prints(f"step {step}, {rollouts[0].rollout_id if rollouts else 'none'}{more}", self._on_print):
            try:
                messages = [_copy_inputs(rollout)[0] for rollout in rollouts]
                value = reward(messages, truth, **{**given, **reward.kwargs})
                return read_results(await value if inspect.isawaitable(value) else value, len(rollouts))
            except BaseException as fault:  # likewise
                return [_exception_result(fault)] * len(rollouts)


def run_kwargs(reward: Reward, step: int, prompt_length: int | list[int]) -> dict[str, Any]:
    """What functions may ask for by name beside the data. A **kwargs alone gets `step` and the data's columns."""
    named = "prompt_length" in reward.signature.names
    return {"step": step, "prompt_length": prompt_length} if named else {"step": step}


def task_kwargs(reward: Reward, task: Task) -> dict[str, Any]:
    """What a task gives: the other columns of its row, and the `TASK_FIELDS` that the function names.

    `extra_info` is always there, if only as an empty dictionary; `data_source` where the row has one.
    """
    fields = {name: getattr(task, name) for name in TASK_FIELDS if name in reward.signature.names}
    return {**{name: value for name, value in fields.items() if value != ""}, **task.reward_kwargs}


def batch_task_kwargs(reward: Reward, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """The columns that any of the tasks has, one value a rollout; None where its task has none."""
    columns = [task_kwargs(reward, rollout.task) for rollout in rollouts]
    return {name: [given.get(name) for given in columns] for name in sorted(set().union(*columns))}


def _copy_inputs(rollout: Rollout) -> tuple[list[Message], Any]:
    """What a function may change as it likes: the rollouts of a group share one ground truth, and all are kept."""
    return [message.model_copy(deep=True) for message in rollout.messages], deepcopy(rollout.task.ground_truth)


def _exception_result(fault: BaseException) -> EvaluateResult:
    """A real cancellation, and the user's Ctrl-C, are raised on."""
    task = asyncio.current_task()
    if isinstance(fault, asyncio.CancelledError) and task is not None and task.cancelling():
        raise fault
    found = user_code.as_exception(fault)
    lines = "".join(traceback.format_tb(fault.__traceback__)[-5:])
    said = user_code.describe(found)
    return truncate_result(fault_result("exception", said, f"Traceback (most recent call last):\n{lines}{said}\n"))
