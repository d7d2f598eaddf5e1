"""Runs reward functions in this process. Anything they raise becomes a typed fault, so the run continues."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, Protocol

from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.concurrency.tasks import spawn
from toolwise.messages import Message
from toolwise.rewards.function import Reward, fault_result, read_result, read_results
from toolwise.rewards.printed_output import PrintCallback, capture_prints, tee_output
from toolwise.rewards.result_bounds import truncate_result
from toolwise.rewards.signature import TASK_FIELDS
from toolwise.types import EvaluateResult, Rollout, Task
from toolwise.untrusted import user_code

MAX_CONCURRENT_CALLS = 256
"""Limit on concurrent async calls."""


class Executor(Protocol):
    """Where reward functions run: in this process or in a sandbox. Always returns one result per rollout, in order."""

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]: ...


class InProcessExecutor:
    """The simplest executor, for trusted rewards. Async calls overlap.

    `on_print` receives what they print, which also goes to the terminal.
    """

    def __init__(self, on_print: PrintCallback | None = None) -> None:
        self._on_print = on_print

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        with tee_output() if self._on_print is not None else nullcontext():
            if reward.mode == "batch":
                return await self._evaluate_many(reward, rollouts, step)
            if reward.mode == "group":
                return await evaluate_groups(
                    rollouts, lambda group: self._evaluate_many(reward, [rollouts[i] for i in group], step)
                )
            slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
            return list(await asyncio.gather(*(spawn(self._evaluate_one(reward, r, step, slots)) for r in rollouts)))

    async def _evaluate_one(
        self, reward: Reward, rollout: Rollout, step: int, slots: asyncio.Semaphore
    ) -> EvaluateResult:
        async with slots:
            with capture_prints(f"step {step}, {rollout.rollout_id}", self._on_print):
                try:
                    columns = deepcopy(task_kwargs(reward, rollout.task))
                    kwargs = {**run_kwargs(reward, step, rollout.prompt_length), **columns, **reward.kwargs}
                    value = reward(*_copy_inputs(rollout), **kwargs)
                    return read_result(await _within_timeout(reward, value))
                except BaseException as fault:  # user code may raise anything
                    return _exception_result(fault)

    async def _evaluate_many(self, reward: Reward, rollouts: Sequence[Rollout], step: int) -> list[EvaluateResult]:
        """One call for all of `rollouts`, or for those of one task; if it fails, it fails for all of them."""
        others = f" and {len(rollouts) - 1} more" if len(rollouts) > 1 else ""
        with capture_prints(f"step {step}, {rollouts[0].rollout_id if rollouts else 'none'}{others}", self._on_print):
            try:
                inputs = [_copy_inputs(rollout) for rollout in rollouts]
                messages, truths = [conversation for conversation, _ in inputs], [truth for _, truth in inputs]
                if reward.mode == "batch":
                    kwargs = run_kwargs(reward, step, [rollout.prompt_length for rollout in rollouts])
                    for name, values in batch_task_kwargs(reward, rollouts).items():
                        kwargs[name] = [deepcopy(value) for value in values]
                else:  # the rollouts of a task share its ground truth and columns
                    columns = deepcopy(task_kwargs(reward, rollouts[0].task))
                    kwargs = {**run_kwargs(reward, step, rollouts[0].prompt_length), **columns}
                truth = truths if reward.mode == "batch" else truths[0]
                value = reward(messages, truth, **{**kwargs, **reward.kwargs})
                return read_results(await _within_timeout(reward, value), len(rollouts))
            except BaseException as fault:  # also from a value's own __deepcopy__
                return [_exception_result(fault)] * len(rollouts)


class _DeadlineError(Exception):
    """Not a `TimeoutError`, which the function itself may raise."""


async def _within_timeout(reward: Reward, value: Any) -> Any:
    """The value that a function returned, or what it returns when awaited."""
    if not inspect.isawaitable(value) or reward.timeout_s is None:
        return await value if inspect.isawaitable(value) else value

    async def wait() -> Any:
        return await value

    fault = _DeadlineError(f"it ran longer than {reward.timeout_s:g} s and was cancelled")
    return await run_with_deadline(reward.timeout_s, wait(), fault)


async def evaluate_groups(
    rollouts: Sequence[Rollout], evaluate: Callable[[list[int]], Coroutine[Any, Any, list[EvaluateResult]]]
) -> list[EvaluateResult]:
    """One call per task, all concurrently, with the indices of its rollouts; a failure affects only its own group."""
    groups: dict[str, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group_id, []).append(index)
    group_results = await asyncio.gather(*(spawn(evaluate(indices)) for indices in groups.values()))
    results: dict[int, EvaluateResult] = {}
    for indices, members in zip(groups.values(), group_results, strict=True):
        results.update(zip(indices, members, strict=True))
    return [results[index] for index in range(len(rollouts))]


def run_kwargs(reward: Reward, step: int, prompt_length: int | list[int]) -> dict[str, Any]:
    """Arguments about the run. `prompt_length` is passed only to functions that name it, not through **kwargs."""
    named = "prompt_length" in reward.signature.names
    return {"step": step, "prompt_length": prompt_length} if named else {"step": step}


def task_kwargs(reward: Reward, task: Task) -> dict[str, Any]:
    """Arguments from a task: the other columns of its row, and the `TASK_FIELDS` that the function names.

    `extra_info` is always present, possibly empty; `data_source` only if the row has one.
    """
    fields = {name: getattr(task, name) for name in TASK_FIELDS if name in reward.signature.names}
    return {**{name: value for name, value in fields.items() if value != ""}, **task.reward_kwargs}


def batch_task_kwargs(reward: Reward, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """The columns that any of the tasks has, with one value per rollout; None if its task lacks the column."""
    columns = [task_kwargs(reward, rollout.task) for rollout in rollouts]
    return {name: [row.get(name) for row in columns] for name in sorted(set().union(*columns))}


def _copy_inputs(rollout: Rollout) -> tuple[list[Message], Any]:
    """Copies that a function may modify: the rollouts of a group share one ground truth, and rollouts are kept."""
    return [message.model_copy(deep=True) for message in rollout.messages], deepcopy(rollout.task.ground_truth)


def _exception_result(fault: BaseException) -> EvaluateResult:
    """Re-raises a real cancellation and the user's Ctrl-C."""
    task = asyncio.current_task()
    if isinstance(fault, asyncio.CancelledError) and task is not None and task.cancelling():
        raise fault
    if isinstance(fault, _DeadlineError):
        return fault_result("timeout", str(fault))
    exception = user_code.as_exception(fault)
    lines = "".join(traceback.format_tb(fault.__traceback__)[-5:])
    text = user_code.describe(exception)
    return truncate_result(fault_result("exception", text, f"Traceback (most recent call last):\n{lines}{text}\n"))
