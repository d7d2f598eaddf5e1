"""Alignment of step rewards to rollout steps."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages.step_rewards import episodes_of
from toolwise.errors import RewardError
from toolwise.messages import Message
from toolwise.rewards import RLDataAligner
from toolwise.rewards.align import align_rollouts, align_steps
from toolwise.sandbox.harness import plain_result
from toolwise.sandbox.wire import read_answer
from toolwise.types import EvaluateResult, EvaluationFault, Rollout, StepData, StepOutput, StopReason, Task, Usage


def steps(count: int, *, base_reward: float | None = None, first: int = 0) -> list[StepData]:
    return [
        StepData(
            system_step_index=place,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            step_info={"assistant_turn_index": first + place},
            base_reward=base_reward,
        )
        for place in range(count)
    ]


def outputs(**rewards: float) -> list[StepOutput]:
    """outputs(s0=1.0, s2=0.5)"""
    return [StepOutput(step_index=int(name[1:]), base_reward=reward) for name, reward in rewards.items()]


def result(*given: StepOutput, score: float | None = 1.0) -> EvaluateResult:
    return EvaluateResult(score=score, step_outputs=list(given))


def rollout(name: str, count: int) -> Rollout:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    return Rollout(name, "g", 0, 0, task, None, tuple(steps(count)), task.prompt, StopReason.ANSWERED, Usage())


def test_each_step_gets_its_reward() -> None:
    aligned, warnings = align_steps(steps(3), outputs(s2=0.3, s0=0.1, s1=0.2))
    assert [s.base_reward for s in aligned] == [0.1, 0.2, 0.3]
    assert warnings == []


def test_the_index_is_that_of_the_assistant_s_turns_not_of_the_steps() -> None:
    aligned, warnings = align_steps(steps(2, first=4), outputs(s4=0.4, s5=0.5))
    assert [s.base_reward for s in aligned] == [0.4, 0.5]
    assert warnings == []


def test_a_step_without_a_turn_index_goes_by_its_own() -> None:
    plain = [s.model_copy(update={"step_info": {}}) for s in steps(2)]
    aligned, _ = align_steps(plain, outputs(s1=0.5))
    assert [s.base_reward for s in aligned] == [None, 0.5]


def test_text_and_number_are_the_same_index() -> None:
    aligned, warnings = align_steps(
        steps(2), [StepOutput(step_index="1", base_reward=0.5), StepOutput(step_index=0, base_reward=0.25)]
    )
    assert [s.base_reward for s in aligned] == [0.25, 0.5]
    assert warnings == []


def test_duplicates_are_named_and_the_first_counts() -> None:
    given_ = [StepOutput(step_index=index, base_reward=reward) for index, reward in [(0, 0.1), ("0", 0.9), (1, 0.2)]]
    aligned, warnings = align_steps(steps(2), given_)
    assert [s.base_reward for s in aligned] == [0.1, 0.2]
    assert len(warnings) == 1
    assert "duplicate step_index 0" in warnings[0]
    assert "2 times" in warnings[0]


def test_unmatched_are_named() -> None:
    given_ = [*outputs(s0=0.1, s7=0.7), StepOutput(step_index="last", base_reward=0.9)]
    aligned, warnings = align_steps(steps(1), given_)
    assert [s.base_reward for s in aligned] == [0.1]
    assert [w.split(":")[0] for w in warnings] == ["unmatched step_index 7", "unmatched step_index last"]


def test_missing_are_named_and_keep_what_the_world_gave() -> None:
    aligned, warnings = align_steps(steps(3, base_reward=0.5), outputs(s1=0.0))
    assert [s.base_reward for s in aligned] == [0.5, 0.0, 0.5]
    assert [w.split(":")[0] for w in warnings] == ["missing step_index 0", "missing step_index 2"]


def test_a_reward_that_says_nothing_of_steps_is_no_cause_for_warning() -> None:
    aligned, warnings = align_steps(steps(2, base_reward=0.5), [])
    assert [s.base_reward for s in aligned] == [0.5, 0.5]
    assert warnings == []


def test_many_rollouts_are_aligned_by_id_and_scores_stay_in_order() -> None:
    raw = {"a": steps(1), "b": steps(2), "c": steps(0)}
    results = [result(*outputs(s0=0.1, s1=0.2), score=2.0), result(*outputs(s0=0.9), score=1.0), result(score=None)]
    aligned = RLDataAligner().align_data_for_rl_processing(results, raw, ["b", "a", "c"])
    assert {name: [s.base_reward for s in found] for name, found in aligned.steps.items()} == {
        "b": [0.1, 0.2],
        "a": [0.9],
        "c": [],
    }
    assert aligned.final_scores == [2.0, 1.0, None]
    assert aligned.warnings == []


def test_one_result_alone_may_be_given_without_a_list() -> None:
    aligned = RLDataAligner().align_data_for_rl_processing(result(*outputs(s0=0.4)), {"a": steps(1)}, ["a"])
    assert aligned.steps["a"][0].base_reward == 0.4


def test_warnings_name_the_rollout() -> None:
    aligned = RLDataAligner().align_data_for_rl_processing([result(*outputs(s0=1, s3=1))], {"a": steps(1)}, ["a"])
    assert aligned.warnings == ["a: unmatched step_index 3: the rollout has 1 steps"]


@pytest.mark.parametrize("given_", [outputs(s0=1, s1=1, s3=1), outputs(s0=1), [*outputs(s0=1, s1=1), *outputs(s1=1)]])
def test_strict_raises_where_it_would_warn(given_: list[StepOutput]) -> None:
    with pytest.raises(RewardError, match="step_index"):
        RLDataAligner(strict=True).align_data_for_rl_processing([result(*given_)], {"a": steps(2)}, ["a"])


def test_strict_is_content_with_what_fits() -> None:
    aligned = RLDataAligner(strict=True).align_data_for_rl_processing(
        [result(*outputs(s0=1, s1=1))], {"a": steps(2)}, ["a"]
    )
    assert [s.base_reward for s in aligned.steps["a"]] == [1, 1]


def test_results_and_rollouts_must_be_as_many() -> None:
    with pytest.raises(RewardError, match="1 results for 2 rollouts"):
        RLDataAligner().align_data_for_rl_processing([result()], {"a": [], "b": []}, ["a", "b"])


def test_a_rollout_without_steps_on_record_is_named() -> None:
    with pytest.raises(RewardError, match="no steps for rollout 'b'"):
        RLDataAligner().align_data_for_rl_processing([result()], {"a": []}, ["b"])


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-1, 1)), max_size=8), st.integers(0, 5))
def test_inputs_are_untouched_and_nothing_is_lost_silently(rewards: list[tuple[int, float]], count: int) -> None:
    raw = steps(count, base_reward=9.0)
    given_ = [StepOutput(step_index=index, base_reward=reward) for index, reward in rewards]
    before: Any = [s.model_dump() for s in raw], [o.model_dump() for o in given_]
    aligned, warnings = align_steps(raw, given_)
    assert ([s.model_dump() for s in raw], [o.model_dump() for o in given_]) == before
    said = {index for index, _ in rewards}
    duplicates = sum(1 for index in said if sum(i == index for i, _ in rewards) > 1)
    missing = sum(1 for index in range(count) if index not in said) if rewards else 0
    unmatched = sum(1 for index in said if index >= count)
    assert len(warnings) == duplicates + missing + unmatched
    first = dict(reversed(rewards))
    assert [s.base_reward for s in aligned] == [first.get(index, 9.0) for index in range(count)]


def test_the_loop_hands_on_scored_rollouts_and_says_what_did_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [rollout("a", 2), rollout("b", 1)]
    results = [result(*outputs(s0=0.1, s1=0.2)), result(*outputs(s0=0.3, s5=1, s6=1))]
    with caplog.at_level(logging.WARNING, "toolwise.rewards"):
        scored = align_rollouts(rollouts, results)
    assert [s.rollout for s in scored] == rollouts
    assert [s.result for s in scored] == results
    assert [[step.base_reward for step in s.steps] for s in scored] == [[0.1, 0.2], [0.3]]
    assert all(step.base_reward is None for r in rollouts for step in r.steps)
    [said] = caplog.messages
    assert "b: unmatched step_index 5" in said
    assert "and 1 more" in said


def test_results_that_do_not_count_have_no_final_score() -> None:
    results = [
        EvaluateResult(score=0.5),
        EvaluateResult(score=0.75, is_score_valid=False),
        EvaluateResult(score=0.25, error=EvaluationFault(kind="judge", message="asleep")),
        EvaluateResult(step_outputs=outputs(s0=0.125)),
    ]
    raw = {name: steps(1) for name in "abcd"}
    aligned = RLDataAligner().align_data_for_rl_processing(results, raw, list("abcd"))
    assert aligned.final_scores == [0.5, None, None, 0.125]


def test_a_rollout_that_is_there_twice_is_warned_about() -> None:
    results = [result(*outputs(s0=0.1)), result(*outputs(s0=0.9)), result(*outputs(s0=0.5))]
    aligned = RLDataAligner().align_data_for_rl_processing(results, {"a": steps(1), "b": steps(1)}, ["a", "a", "b"])
    assert [s.base_reward for s in aligned.steps["a"]] == [0.1]
    [warning] = aligned.warnings
    assert (str(warning), warning.name) == (
        "a: duplicate rollout_id (2 times): ids must be unique",
        "duplicate_rollout",
    )
    with pytest.raises(RewardError, match="duplicate rollout_id"):
        RLDataAligner(strict=True).align_data_for_rl_processing(results[:2], {"a": steps(1)}, ["a", "a"])


def test_rollouts_that_share_an_id_keep_their_own_steps() -> None:
    scored = align_rollouts([rollout("a", 1), rollout("a", 2)], [result(*outputs(s0=0.1)), result()])
    assert [[step.base_reward for step in s.steps] for s in scored] == [[0.1], [None, None]]
    assert all("duplicate rollout_id" in s.warnings[0] for s in scored)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_step_reward_that_is_no_number_is_named_and_never_trained_on(reward: float) -> None:
    aligned, [warning] = align_steps(steps(2, base_reward=0.5), outputs(s0=reward, s1=0.25), "a")
    assert [s.base_reward for s in aligned] == [0.5, 0.25]
    assert warning.name == "non_finite"
    assert f"a: non_finite step_index 0: its base_reward is {reward}" in warning


def in_world(name: str, *rewards: float | None) -> Rollout:
    """A rollout whose environment gave its steps these rewards."""
    made = rollout(name, len(rewards))
    return replace(
        made, steps=tuple(s.model_copy(update={"base_reward": r}) for s, r in zip(made.steps, rewards, strict=True))
    )


def test_without_a_score_all_steps_count_also_those_that_only_their_environment_paid() -> None:
    partial = EvaluateResult(step_outputs=outputs(s0=0.5))
    [scored] = align_rollouts([in_world("a", 1.0, 1.0, 1.0)], [partial])
    assert [step.base_reward for step in scored.steps] == [0.5, 1.0, 1.0]
    assert scored.score == 2.5
    assert partial.score == 0.5  # inputs are never modified
    episodes = episodes_of([scored.steps], [scored.score], ["g"])
    assert (episodes.scores.tolist(), episodes.rewards.tolist()) == ([2.5], [0.5, 1.0, 1.0])
    aligned = RLDataAligner().align_data_for_rl_processing(partial, {"a": in_world("a", 1.0, 1.0, 1.0).steps}, ["a"])
    assert aligned.final_scores == [2.5]


def test_a_sandbox_keeps_apart_a_score_that_was_given_and_one_that_was_not() -> None:
    for score, total in ((None, 2.5), (0.5, 0.5)):
        sent = plain_result(EvaluateResult(score=score, step_outputs=outputs(s0=0.5)))
        [scored] = align_rollouts([in_world("a", 1.0, 1.0, 1.0)], [read_answer(sent)])
        assert scored.score == total


def test_a_sum_of_which_no_step_gets_anything_stays() -> None:
    unmatched = EvaluateResult(step_outputs=outputs(s7=0.5))
    [scored] = align_rollouts([in_world("a", None, None)], [unmatched])
    assert scored.score == 0.5
