"""Rewards from the episode itself: `env` and `tools`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from toolwise.config.schema import RewardConfig
from toolwise.errors import RewardError
from toolwise.messages import Message
from toolwise.training.evaluate import build_scoring
from toolwise.types import EvaluateResult, Rollout, StepData, StopReason, Task, Usage


def rollout(*rewards: float | None, tools: dict[str, float] | None = None) -> Rollout:
    messages = [Message(role="user", content="?"), Message(role="assistant", content="yes")]
    steps = tuple(
        StepData(
            system_step_index=i,
            observation_data=[],
            action_taken={"type": "text"},
            resulting_messages_history=[],
            base_reward=reward,
        )
        for i, reward in enumerate(rewards)
    )
    task = Task(task_id="t", prompt=messages[:1])
    return Rollout("r", "g", 0, 0, task, None, steps, messages, StopReason.ENV_DONE, Usage(), tools or {})


def score(of: Rollout, **settings: Any) -> EvaluateResult:
    scoring = build_scoring(RewardConfig.model_validate(settings))
    try:
        return asyncio.run(scoring.evaluate([of], step=0))[0]
    finally:
        scoring.close()


def test_the_world_s_rewards_add_up_and_missing_ones_are_nothing() -> None:
    assert score(rollout(0.5, None, -0.25), function="env").score == 0.25
    assert score(rollout(), function="env").score == 0.0


def test_a_rollout_that_met_a_fault_has_no_score_rather_than_a_zero() -> None:
    broken = replace(rollout(1.0), stop_reason=StopReason.ENV_FAULT, fault="step: ValueError: gone")
    result = score(broken, function="env")
    assert not result.has_valid_score
    assert result.error is not None
    assert result.error.kind == "env_fault"
    assert "gone" in result.error.message


def test_what_the_tools_say_at_the_end_adds_up_and_is_told_by_name() -> None:
    result = score(rollout(tools={"a": 1.0, "b": -0.5}), function="tools")
    assert result.score == 0.5
    assert {name: metric.score for name, metric in result.metrics.items()} == {"tool/a": 1.0, "tool/b": -0.5}


def test_they_are_weighed_against_functions() -> None:
    right = {"function": "toolwise.rewards.library.matching:exact_match_reward"}
    parts = [{"function": "env", "weight": 2.0}, {"function": "tools", "weight": 10.0}, right]
    of = rollout(0.5, tools={"a": 0.1})
    of = replace(of, task=of.task.model_copy(update={"ground_truth": "yes"}))
    assert score(of, parts=parts).score == pytest.approx(2 * 0.5 + 10 * 0.1 + 1.0)


def test_they_take_no_arguments() -> None:
    with pytest.raises(RewardError, match="takes no argument 'x'"):
        score(rollout(), function="env", kwargs={"x": 1})
