"""Combining several rewards: weighted sums, and normalization within groups."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from toolwise.messages import Message
from toolwise.rewards.align import align_steps
from toolwise.rewards.combine import CompositeReward, WeightedReward, combine, normalize_by_group
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.function import Reward, Signature
from toolwise.rewards.results import fault_result
from toolwise.types import EvaluateResult, MetricResult, Rollout, StepData, StepOutput, StopReason, Task, Usage


def part(name: str, weight: float = 1.0) -> WeightedReward:
    def function(messages: Any, ground_truth: Any) -> float:
        return 0.0

    return WeightedReward(Reward(name, Signature.of(function, name), function=function), weight)


def results(*scores: float) -> list[EvaluateResult]:
    return [EvaluateResult(score=score) for score in scores]


def test_scores_add_up_by_weight() -> None:
    combined = combine([(part("a", 2.0), results(1, 0)), (part("b", -0.5), results(4, 2))], ["g", "g"], "sum")
    assert [r.score for r in combined] == [0.0, -1.0]


def test_step_rewards_add_up_by_weight_and_step() -> None:
    one = EvaluateResult(score=0, step_outputs=[StepOutput(step_index=0, base_reward=1.0)])
    two = EvaluateResult(
        score=0, step_outputs=[StepOutput(step_index=0, base_reward=4.0), StepOutput(step_index=1, base_reward=2.0)]
    )
    (combined,) = combine([(part("a"), [one]), (part("b", 0.5), [two])], ["g"], "sum")
    assert {o.step_index: o.base_reward for o in combined.step_outputs or ()} == {0: 3.0, 1: 1.0}


def with_steps(*rewards: tuple[int | str, float], score: float | None = 0.0) -> EvaluateResult:
    given = [StepOutput(step_index=index, base_reward=reward) for index, reward in rewards]
    return EvaluateResult(score=score, step_outputs=given)


def earned(result: EvaluateResult, count: int) -> tuple[list[float | None], list[str]]:
    """The step rewards of a rollout after alignment, and the warnings."""
    bare = {"observation_data": None, "action_taken": {"type": "text"}, "resulting_messages_history": []}
    steps = [StepData(system_step_index=place, **bare) for place in range(count)]  # type: ignore[arg-type]
    aligned, misfits = align_steps(steps, result.step_outputs or ())
    return [step.base_reward for step in aligned], [misfit.name for misfit in misfits]


def test_an_index_is_the_same_as_text() -> None:
    parts = [(part("a"), [with_steps((0, -0.5), (1, -0.5))]), (part("b"), [with_steps(("0", 0.75), ("1", 0.75))])]
    assert earned(combine(parts, ["g"], "sum")[0], 2) == ([0.25, 0.25], [])


def test_of_an_index_given_twice_by_one_part_the_first_counts_and_it_is_named() -> None:
    twice = with_steps((0, 1.0), (0, 3.0), score=None)
    (combined,) = combine([(part("a", 0.5), [twice])], ["g"], "sum")
    assert combined.score == 0.5
    assert earned(combined, 1) == ([0.5], ["duplicate"])


def test_a_part_s_nan_does_not_take_what_others_gave_the_step() -> None:
    parts = [(part("a"), [with_steps((0, -0.5), (1, -0.5))]), (part("b"), [with_steps((0, math.nan), (2, math.inf))])]
    rewards, misfits = earned(combine(parts, ["g"], "sum")[0], 3)
    assert rewards == [-0.5, -0.5, None]
    assert "non_finite" in misfits


def test_a_part_s_step_rewards_are_normalised_by_the_scale_of_its_score() -> None:
    """By hand: 90, 80, 10 have mean 60 and sample std 43.589; the constant part contributes nothing."""
    one = [with_steps((0, step), score=score) for score, step in ((90.0, -10.0), (80.0, -20.0), (10.0, 0.0))]
    same = [with_steps((0, 5.0), score=1.0) for _ in range(3)]
    combined = combine([(part("a", 2.0), one), (part("b"), same)], ["g"] * 3, "normalize")
    std = 1900.0**0.5
    assert [r.score for r in combined] == pytest.approx([2 * 30 / std, 2 * 20 / std, 2 * -50 / std])
    steps = [earned(r, 1)[0][0] for r in combined]
    assert steps == pytest.approx([2 * -10 / std, 2 * -20 / std, 0.0])


def test_parts_without_scores_are_completed_like_one_without() -> None:
    bare = with_steps((0, 1.0), score=None)
    assert combine([(part("a", 0.5), [bare])], ["g"], "sum")[0].is_sum_of_steps
    assert not combine([(part("a"), [bare]), (part("b"), results(1))], ["g"], "sum")[0].is_sum_of_steps
    assert not combine([(part("a"), [bare])], ["g"], "normalize")[0].is_sum_of_steps


def test_every_part_is_a_metric_and_names_that_clash_are_kept_apart() -> None:
    one = EvaluateResult(score=0.5, metrics={"correct": MetricResult(score=1.0)})
    two = EvaluateResult(score=0.25, metrics={"correct": MetricResult(score=0.0)})
    (combined,) = combine([(part("a"), [one]), (part("b"), [two])], ["g"], "sum")
    assert {name: m.score for name, m in combined.metrics.items()} == {
        "correct": 1.0,
        "b/correct": 0.0,
        "a": 0.5,
        "b": 0.25,
    }


def test_a_part_is_called_by_its_name_and_hides_no_metric_of_that_name() -> None:
    named = WeightedReward(part("path/to/file.py:f").reward, name="correct")
    one = EvaluateResult(score=0.5, reason="fine", metrics={"correct": MetricResult(score=1.0)})
    (combined,) = combine([(named, [one]), (part("b"), results(1))], ["g"], "sum")
    assert {name: m.score for name, m in combined.metrics.items()} == {"correct/correct": 1.0, "correct": 0.5, "b": 1.0}
    assert combined.reason == "correct: fine"


def test_a_part_that_failed_makes_the_whole_fail_and_is_named() -> None:
    combined = combine(
        [(part("a"), results(1, 1)), (part("b"), [fault_result("timeout", "too slow"), *results(2)])], ["g", "g"], "sum"
    )
    assert combined[0].error is not None
    assert (combined[0].error.kind, combined[0].error.message) == ("timeout", "b: too slow")
    assert combined[0].score is None
    assert combined[1].score == 3.0


def test_a_part_that_is_not_valid_is_no_zero() -> None:
    invalid = EvaluateResult(score=0.0, is_score_valid=False, reason="cannot tell")
    (combined,) = combine([(part("a"), results(1)), (part("b"), [invalid])], ["g"], "sum")
    assert not combined.has_valid_score
    assert (combined.score, combined.error, combined.reason) == (None, None, "b: cannot tell")
    failed = fault_result("timeout", "too slow")
    (combined,) = combine([(part("a"), [invalid]), (part("b"), [failed])], ["g"], "sum")
    assert combined.error is not None  # an error stays one, whatever other parts say
    assert (combined.error.kind, combined.error.message) == ("timeout", "b: too slow")


def test_normalising_is_within_the_group() -> None:
    """By hand: 1, 2, 3 have mean 2 and sample std 1; 10, 10 are equal; 0, 100 have mean 50, std 70.71."""
    got, _ = normalize_by_group([1, 10, 2, 10, 3, 0, 100], ["a", "b", "a", "b", "a", "c", "c"])
    assert got == pytest.approx([-1, 0, 0, 0, 1, -(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert got[1] == got[3] == 0.0


def test_normalised_rewards_weigh_alike_whatever_their_range() -> None:
    large, small = results(0, 1000), results(1, 0)
    combined = combine([(part("large"), large), (part("small"), small)], ["g", "g"], "normalize")
    assert [r.score for r in combined] == pytest.approx([0.0, 0.0], abs=1e-5)


def test_what_did_not_count_is_left_out_of_the_groups_statistics() -> None:
    assert normalize_by_group([1, None, 3], ["g"] * 3)[0] == pytest.approx([-(0.5**0.5), None, 0.5**0.5], abs=1e-5)


def rollouts(*said: str) -> list[Rollout]:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")], ground_truth="yes")
    return [
        Rollout(
            text, "g", 0, i, task, None, (), (Message(role="assistant", content=text),), StopReason.ANSWERED, Usage()
        )
        for i, text in enumerate(said)
    ]


def right(messages: list[Message], ground_truth: Any) -> float:
    return float(messages[-1].content == ground_truth)


def length(messages: list[Message], ground_truth: Any) -> float:
    return float(len(messages[-1].content or ""))


def test_a_single_reward_is_passed_on_as_it_is() -> None:
    alone = CompositeReward((WeightedReward(Reward.of(right)),))
    results = asyncio.run(alone.evaluate(InProcessExecutor(), rollouts("yes", "no"), step=0))
    assert [(r.score, r.metrics) for r in results] == [(1.0, {}), (0.0, {})]


def test_several_rewards_run_and_combine() -> None:
    both = CompositeReward((WeightedReward(Reward.of(right)), WeightedReward(Reward.of(length), -0.1)))
    results = asyncio.run(both.evaluate(InProcessExecutor(), rollouts("yes", "no"), step=0))
    assert [r.score for r in results] == pytest.approx([0.7, -0.2])
    assert both.name == "right + length"
