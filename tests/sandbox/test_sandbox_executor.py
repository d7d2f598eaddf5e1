"""The sandbox executor gives the same results as the in-process executor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolwise.messages import Message
from toolwise.rewards.executor import Executor, InProcessExecutor
from toolwise.rewards.function import Reward
from toolwise.sandbox import Sandbox, SandboxExecutor
from toolwise.types import Rollout, StopReason, Task, Usage

SOURCE = """
def one(messages, ground_truth, step, level, weight=1.0):
    return weight * (ground_truth + step + level)

def batch(rollouts_messages, ground_truths, step, level):
    return [t + step + l for t, l in zip(ground_truths, level)]

def group(group_messages, ground_truth, step, level):
    if ground_truth == 1:
        raise ValueError("not this group")
    return [ground_truth + step + level + 0.1 * len(group_messages) + 0.01 * i for i in range(len(group_messages))]

def fails(messages, ground_truth):
    raise ValueError(str(ground_truth))
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(timeout_s=5.0) as sandbox:
        yield sandbox


def _rollout(number: int) -> Rollout:
    messages = [Message(role="user", content="?"), Message(role="assistant", content=str(number))]
    task = Task(
        task_id=str(number), prompt=messages[:1], ground_truth=number, reward_kwargs={"level": 10 * number, "x": 1}
    )
    return Rollout(
        str(number), f"group {number % 2}", 0, number, task, None, (), messages, StopReason.ANSWERED, Usage()
    )


@pytest.mark.parametrize("name", ["one", "batch", "group", "fails"])
def test_it_agrees_with_the_executor_in_this_process(tmp_path: Path, sandbox: Sandbox, name: str) -> None:
    path = tmp_path / "r.py"
    path.write_text(SOURCE)
    kwargs = {"weight": 2.0} if name == "one" else {}
    reward = Reward.of(f"{path}:{name}", kwargs)
    rollouts = [_rollout(i) for i in range(5)]
    executor: Executor = SandboxExecutor(sandbox)
    there = asyncio.run(executor.evaluate(reward, rollouts, step=3))
    here = asyncio.run(InProcessExecutor().evaluate(reward, rollouts, step=3))
    assert [(r.score, r.error and r.error.kind) for r in there] == [(r.score, r.error and r.error.kind) for r in here]


def test_a_reward_given_as_a_function_is_found_again(sandbox: Sandbox) -> None:
    from toolwise.demo.reward import small_world_reward

    results = asyncio.run(SandboxExecutor(sandbox).evaluate(Reward.of(small_world_reward), [_rollout(1)], step=0))
    assert results[0].has_valid_score
