"""Runs reward functions in this process, and reads the rewards that an episode itself produced.

Anything a function raises becomes a typed fault, so the run continues.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Coroutine, Sequence
from copy import deepcopy
from typing import Any, Protocol

from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.concurrency.tasks import spawn
from toolwise.rewards.function import TASK_FIELDS, Reward, Signature
from toolwise.rewards.printed_output import PrintCallback, capture_prints
from toolwise.rewards.results import fault_result, read_result, read_results, truncate_result
from toolwise.types import EvaluateResult, MetricResult, Rollout, Task
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
        slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def call(indices: list[int]) -> list[EvaluateResult]:
            async with slots:
                return await self._call(reward, [rollouts[index] for index in indices], step)

        if reward.mode == "batch":
            return await call(list(range(len(rollouts))))
        if reward.mode == "group":
            return await evaluate_groups(rollouts, call)
        results = await asyncio.gather(*(spawn(call([index])) for index in range(len(rollouts))))
        return [result for (result,) in results]

    async def _call(self, reward: Reward, rollouts: Sequence[Rollout], step: int) -> list[EvaluateResult]:
        """One call for one rollout, those of a task, or all of them; if it fails, it fails for all of them."""
        others = f" and {len(rollouts) - 1} more" if len(rollouts) > 1 else ""
        with capture_prints(f"step {step}, {rollouts[0].rollout_id if rollouts else 'none'}{others}", self._on_print):
            try:
                # Copies that a function may modify: the rollouts of a group share one ground truth, and are kept.
                messages = [[m.model_copy(deep=True) for m in rollout.messages] for rollout in rollouts]
                truths = [deepcopy(rollout.task.ground_truth) for rollout in rollouts]
                if reward.mode == "batch":
                    kwargs = run_kwargs(reward, step, [rollout.prompt_length for rollout in rollouts])
                    for name, values in batch_task_kwargs(reward, rollouts).items():
                        kwargs[name] = [deepcopy(value) for value in values]
                else:  # the rollouts of a task share its ground truth and columns
                    columns = deepcopy(task_kwargs(reward, rollouts[0].task))
                    kwargs = {**run_kwargs(reward, step, rollouts[0].prompt_length), **columns}
                conversations = messages[0] if reward.mode == "pointwise" else messages
                truth = truths if reward.mode == "batch" else truths[0]
                value = await _within_timeout(reward, reward(conversations, truth, **{**kwargs, **reward.kwargs}))
                return [read_result(value)] if reward.mode == "pointwise" else read_results(value, len(rollouts))
            except BaseException as fault:  # user code may raise anything, also from a value's own __deepcopy__
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


def _exception_result(fault: BaseException) -> EvaluateResult:
    """Re-raises a real cancellation and the user's Ctrl-C."""
    if isinstance(fault, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
        raise fault
    if isinstance(fault, _DeadlineError):
        return fault_result("timeout", str(fault))
    exception = user_code.as_exception(fault)
    lines = "".join(traceback.format_tb(fault.__traceback__)[-5:])
    text = user_code.describe(exception)
    return truncate_result(fault_result("exception", text, f"Traceback (most recent call last):\n{lines}{text}\n"))


# Rewards that the episode itself produced. They need no function and no sandbox, since the rollout already holds the
# numbers. `reward.function = "env"` scores by the environment alone; as `reward.parts` they are weighted against
# functions over messages.


def _tools_result(rollout: Rollout) -> EvaluateResult:
    """The sum of the tools' `calc_reward` values; 0 if there are none."""
    metrics = {f"tool/{name}": MetricResult(score=reward) for name, reward in rollout.tool_rewards.items()}
    return EvaluateResult(score=sum(rollout.tool_rewards.values()), metrics=metrics)


def _env_result(rollout: Rollout) -> EvaluateResult:
    """The sum of the step rewards from the environment or from tool calls. A rollout that met a fault gets no score."""
    if not rollout.trainable:
        return fault_result("env_fault", rollout.fault or f"the episode ended with {rollout.stop_reason.value}")
    return EvaluateResult(score=sum(step.base_reward or 0.0 for step in rollout.steps))


def _agent_result(rollout: Rollout) -> EvaluateResult:
    """What an outside agent returned. A rollout that met a fault gets no score."""
    if not rollout.trainable:
        return fault_result("env_fault", rollout.fault or f"the agent ended with {rollout.stop_reason.value}")
    if rollout.result is None and rollout.stop_reason.truncated:
        return EvaluateResult(score=0.0, reason=f"the agent was stopped: {rollout.stop_reason.value}")
    text = "the agent returned no reward: return a number or an EvaluateResult, or set reward.function"
    return rollout.result or fault_result("bad_type", text)


EPISODE_REWARDS: dict[str, Callable[[Rollout], EvaluateResult]] = {
    "tools": _tools_result,
    "env": _env_result,
    "agent": _agent_result,
}


def episode_reward(name: str) -> Reward:
    """A `Reward` identified by its name; it has no function."""
    return Reward(name, Signature("pointwise", ("messages", "ground_truth")), reference=name)


def score_episodes(name: str, rollouts: Sequence[Rollout]) -> list[EvaluateResult]:
    return [EPISODE_REWARDS[name](rollout) for rollout in rollouts]
