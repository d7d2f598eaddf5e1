"""Size limits of results: every excess is a typed fault or a marked cut before it reaches a file."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from toolwise.messages import Message
from toolwise.rewards.align import align_rollouts
from toolwise.rewards.combine import CompositeReward, WeightedReward, combine
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.function import Reward, reward_function
from toolwise.rewards.results import read_result
from toolwise.training.metrics import summarize
from toolwise.training.rollout_files import write_records
from toolwise.types import EvaluateResult, Rollout, StepData, StopReason, Task, Usage
from toolwise.untrusted.bounds import MAX_METRICS, MAX_REASON_CHARS, MAX_STEP_OUTPUTS

TASK = Task(task_id="t", prompt=[Message(role="user", content="?")])


def rollout(name: str = "r") -> Rollout:
    step = StepData(
        system_step_index=0, observation_data=None, action_taken={"type": "text"}, resulting_messages_history=[]
    )
    return Rollout(name, "g", 0, 0, TASK, None, (step,), TASK.prompt, StopReason.ANSWERED, Usage())


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (1e308, "out_of_range", "the score is 1e+308"),
        (-1e13, "out_of_range", "must lie between ±1e+12"),
        ({"score": 1e308}, "out_of_range", "the score"),
        ({"score": 0.5, "metrics": {"m": 1e308}}, "out_of_range", "the metric 'm'"),
        ({"score": 0.5, "metrics": {"m": math.nan}}, "non_finite", "the metric 'm' is nan"),
        ({"score": 0.5, "metrics": {str(i): 1.0 for i in range(MAX_METRICS + 1)}}, "too_big", "257 metrics"),
        ({"score": 0.5, "metrics": {"x" * 10_000: 1.0}}, "too_big", "10,000 characters"),
        (
            {"score": 1, "step_outputs": [{"step_index": i, "base_reward": 0} for i in range(MAX_STEP_OUTPUTS + 1)]},
            "too_big",
            "10,001 step outputs",
        ),
        ({"score": 1, "step_outputs": [{"step_index": 10**5_000, "base_reward": 0}]}, "", ""),
        ({"score": 1, "step_outputs": [{"step_index": 10**20, "base_reward": 0}]}, "too_big", "step_index"),
        ({"score": 1, "step_outputs": [{"step_index": "x" * 500, "base_reward": 0}]}, "too_big", "step_index"),
        ({"step_outputs": [{"step_index": 0, "base_reward": 1e308}]}, "out_of_range", "1e+308"),
        ({"step_outputs": [{"step_index": i, "base_reward": 1e308} for i in range(2)]}, "out_of_range", "1e+308"),
        (10**400, "non_finite", "too large"),
    ],
    ids=range(14),
)
def test_what_is_beyond_a_limit_is_a_typed_fault(value: Any, kind: str, words: str) -> None:
    result = read_result(value)
    assert not result.has_valid_score
    assert result.error is not None
    assert not kind or result.error.kind == kind
    assert words in result.error.message


def test_long_texts_are_cut_and_say_so() -> None:
    long, half = "x" * (MAX_REASON_CHARS + 7), "\ud800"
    step = {"step_index": 0, "base_reward": 0.0, "reason": long}
    result = read_result(
        {"score": 1, "reason": long, "metrics": {half: {"score": 1, "reason": long}}, "step_outputs": [step]}
    )
    assert result.has_valid_score
    assert result.step_outputs is not None
    reasons = [result.reason, result.metrics["\\ud800"].reason, result.step_outputs[0].reason]
    assert [reason and reason.endswith(" … cut, 7 characters") for reason in reasons] == [True] * 3


def test_a_score_that_is_the_sum_of_steps_stays_one() -> None:
    result = read_result({"step_outputs": [{"step_index": 0, "base_reward": 1.0, "reason": "x" * 30_000}]})
    assert result.is_sum_of_steps


def test_a_step_reward_beyond_the_limit_is_named_and_left_out() -> None:
    result = read_result({"score": 1, "step_outputs": [{"step_index": 0, "base_reward": 1e300}]})
    scored = align_rollouts([rollout()], [result])[0]
    assert scored.steps[0].base_reward is None
    assert "is ignored" in scored.warnings[0]


def test_a_weighted_sum_beyond_the_limit_is_a_fault_and_no_crash() -> None:
    @reward_function
    def half(messages: Any, ground_truth: Any) -> float:
        return 0.5

    parts = [(WeightedReward(Reward.of(half), 1e300), [EvaluateResult(score=1e10)])]
    found = combine(parts, ["g"], "sum")[0]
    assert found.error is not None
    assert found.error.kind == "out_of_range"


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "fault",
    [SilentError(), ValueError("x" * 3_000_000), ValueError("\ud800\x1b[2J")],
    ids=["no message", "3 million characters", "control characters"],
)
def test_whatever_a_reward_raises_here_is_a_bounded_fault(fault: Exception, tmp_path: Path) -> None:
    @reward_function
    def raising(messages: Any, ground_truth: Any) -> float:
        raise fault

    result = asyncio.run(InProcessExecutor().evaluate(Reward.of(raising), [rollout()], step=0))[0]
    assert result.error is not None
    assert result.error.kind == "exception"
    assert len(result.model_dump_json()) < 100_000


def test_files_of_hostile_results_are_json_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run writes them: NaN in the data, endless warnings, metrics that differ between rollouts."""
    # pytest cannot send a lone surrogate in a log from one process to another.
    monkeypatch.setattr(logging.getLogger("toolwise.rewards"), "disabled", True)
    task = Task(
        task_id="\ud800\x1b]0;x\x07",
        prompt=TASK.prompt,
        ground_truth=math.nan,
        reward_kwargs={"a": math.inf, "b": 10**4_400, "c": object()},
        extra_info={"kind": "k" * 10_000},
    )
    rollouts, results = [], []
    for number in range(40):
        base = rollout(f"\udc80{number}")
        rollouts.append(
            Rollout(base.rollout_id, "g", 0, 0, task, None, base.steps, base.messages, base.stop_reason, base.usage)
        )
        outputs = [{"step_index": i + 5, "base_reward": math.nan} for i in range(1_000)]
        metrics = {f"m{number}-{i}": 1.0 for i in range(200)}
        results.append(
            read_result({"score": number, "metrics": metrics, "reason": "y" * 10**6, "step_outputs": outputs})
        )
    scored = align_rollouts(rollouts, results)
    write_records(tmp_path, "step", scored, [])
    content = (tmp_path / "step.jsonl").read_bytes()
    assert b"NaN" not in content
    assert b"Infinity" not in content
    lines = [json.loads(line) for line in content.decode("utf-8").splitlines()]
    assert len(lines) == 40
    assert lines[0]["warnings"][-1].startswith("… and ")
    assert len(lines[0]["warnings"]) == 21
    assert max(map(len, content.splitlines())) < 100_000
    figures = summarize(scored)
    assert len(figures) < 2 * MAX_METRICS + 50
    assert figures["reward/metrics_left_out"] == 40 * 200 - MAX_METRICS
    assert all(math.isfinite(value) for value in figures.values())


class Forger:
    """An executor that does not check results."""

    async def evaluate(self, reward: Reward, rollouts: Any, *, step: int) -> list[EvaluateResult]:
        return [EvaluateResult(score=1e300), EvaluateResult(score=1.0, reason="x" * 10**6)]


def test_what_another_executor_gives_is_bounded_too() -> None:
    @reward_function
    def half(messages: Any, ground_truth: Any) -> float:
        return 0.5

    rewards = CompositeReward((WeightedReward(Reward.of(half)),))
    first, second = asyncio.run(rewards.evaluate(Forger(), [rollout("a"), rollout("b")], step=0))
    assert first.error is not None
    assert first.error.kind == "out_of_range"
    assert len(second.reason or "") < 21_000
