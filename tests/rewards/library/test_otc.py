"""The OTC reward: worked by hand, and through the executor as in a run."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from toolwise.errors import ConfigError
from toolwise.messages import Message, ToolCall
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.function import Reward
from toolwise.rewards.library.otc import otc_reward, tool_productivity
from toolwise.types import Rollout, StopReason, Task, Usage

CORRECT = "toolwise.demo.reward:small_world_reward"


def said(answer: int, calls: int) -> list[Message]:
    turns = [Message(role="user", content="?")]
    for number in range(calls):
        call = ToolCall(id=f"c{number}", name="calculator", arguments={"expression": "1+1"})
        turns += [Message(role="assistant", content="", tool_calls=[call]), Message(role="tool", content="2")]
    return [*turns, Message(role="assistant", content=f"Answer: {answer}")]


def test_the_fewest_calls_among_the_right_earn_the_most() -> None:
    group = [said(7, 1), said(7, 2), said(7, 3), said(8, 0), said(7, 1)]
    scores = [result.score for result in otc_reward(group, "7", correct=CORRECT)]
    # n = 1: f(2) = 4/3, f(3) = 3/2; an incorrect one earns nothing, however few its calls.
    assert scores == pytest.approx([1, math.sin(2 * math.pi / 3), math.sin(0.75 * math.pi), 0, 1])


def test_where_a_right_one_made_no_call_every_call_costs() -> None:
    scores = [result.score for result in otc_reward([said(7, 0), said(7, 1), said(7, 2)], "7", correct=CORRECT)]
    assert scores == pytest.approx([1, math.cos(math.pi / 3), math.cos(2 * math.pi / 5)])


def test_prices_weigh_the_calls() -> None:
    group = [said(7, 1), said(7, 2)]
    scores = [result.score for result in otc_reward(group, "7", correct=CORRECT, prices={"calculator": 0.5})]
    # Costs of 0.5 and 1: f = 2·0.5·1 / 1.5 = 2/3, as 1 and 2 calls would have.
    assert scores == pytest.approx([1, math.sin(2 * math.pi / 3)])
    free = otc_reward(group, "7", correct=CORRECT, prices={"search": 1.0, "*": 0.0})
    assert [result.score for result in free] == [1.0, 1.0]
    with pytest.raises(ConfigError, match="the price of 'calculator' is -1"):
        otc_reward(group, "7", correct=CORRECT, prices={"calculator": -1})


@pytest.mark.parametrize("text", ["<tool_call>{oops</tool_call>", '<tool_call>{"name": "calculator", "arg'])
def test_a_call_that_nobody_can_read_is_a_call(text: str) -> None:
    turns = said(7, 0)
    garbled = [turns[0], Message(role="assistant", content=text), *turns[1:]]
    scores = [result.score for result in otc_reward([turns, garbled, said(7, 1)], "7", correct=CORRECT)]
    assert scores[1] == scores[2] < 1


def test_where_none_is_right_none_earns() -> None:
    assert [r.score for r in otc_reward([said(1, 0), said(2, 2)], "7", correct=CORRECT)] == [0, 0]


@pytest.mark.parametrize("fewest", [0, 1, 2, 5])
def test_it_falls_with_every_call_beyond_the_fewest(fewest: int) -> None:
    worth = [tool_productivity(calls, fewest) for calls in range(fewest, fewest + 8)]
    assert worth[0] == pytest.approx(1)
    assert all(later < earlier for earlier, later in itertools.pairwise(worth))
    assert worth[-1] > 0


def test_a_run_calls_it_with_a_whole_group() -> None:
    reward = Reward.of("toolwise.rewards.library.otc:otc_reward", {"correct": CORRECT})
    task = Task(task_id="t", prompt=[{"role": "user", "content": "?"}], ground_truth="7")
    rollouts = [
        Rollout(
            rollout_id=f"g/{i}",
            group_id="g",
            batch_data_id=0,
            rollout_offset=i,
            task=task,
            route=None,
            steps=(),
            messages=tuple(messages),
            stop_reason=StopReason.ANSWERED,
            usage=Usage(),
        )
        for i, messages in enumerate([said(7, 2), said(7, 1)])
    ]
    results = asyncio.run(InProcessExecutor().evaluate(reward, rollouts, step=0))
    assert [r.score for r in results] == pytest.approx([math.sin(2 * math.pi / 3), 1])
    assert results[0].metrics["correct"].score == 1


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="`correct` is missing"):
        otc_reward([said(1, 0)], "1")
    with pytest.raises(ConfigError, match="smoothing"):
        otc_reward([said(1, 0)], "1", correct=CORRECT, smoothing=0)
    with pytest.raises(ConfigError, match="group reward"):
        otc_reward([said(1, 0)], "1", correct="toolwise.rewards.library.otc:otc_reward")
