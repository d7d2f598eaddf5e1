"""The examples run; that the README shows the quickstart is held by tests/docs/test_readme.py."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from toolwise import EvaluateResult, Message, Rollout, StopReason, Task, ToolCall, Usage
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.function import Reward

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_quickstart_is_fifteen_lines_of_code() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in code) <= 18


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_link_of_the_readme_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def conversation(*calls: int, answer: str = "It is 37.") -> Rollout:
    """A rollout whose assistant makes so many calls in each turn before it answers."""
    call = ToolCall(name="search", arguments={"query": "Velora"})
    turns = [Message(role="assistant", content="", tool_calls=[call] * n) for n in calls]
    task = Task(task_id="t", prompt=[Message(role="user", content="?")], ground_truth="37")
    messages = (*task.prompt, *turns, Message(role="assistant", content=answer))
    return Rollout("r", "g", 0, 0, task, None, (), messages, StopReason.ANSWERED, Usage())


def scores(name: str, rollouts: list[Rollout], **kwargs: float) -> list[EvaluateResult]:
    reward = Reward.of(f"{ROOT / 'examples' / 'my_rewards.py'}:{name}", kwargs)
    return asyncio.run(InProcessExecutor().evaluate(reward, rollouts, step=0))


def test_the_pointwise_example_prices_calls_step_by_step() -> None:
    (result,) = scores("right_and_thrifty", [conversation(1, 2)], price_per_call=0.2)
    assert result.score == pytest.approx(0.4)
    assert [(o.step_index, o.base_reward) for o in result.step_outputs or ()] == [(0, -0.2), (1, -0.4), (2, 0.0)]


def test_the_batch_example_prefers_the_short() -> None:
    results = scores("shortest_of_the_batch", [conversation(answer="37"), conversation(answer="3737")])
    assert [r.score for r in results] == [0.5, 0.0]


def test_the_group_example_ranks_by_calls() -> None:
    results = scores("rank_within_the_task", [conversation(2), conversation(), conversation(1)])
    assert [r.score for r in results] == [0.0, 2.0, 1.0]
