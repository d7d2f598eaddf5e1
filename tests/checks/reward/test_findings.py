"""Each finding on its own, on hand-made results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.checks.reward.findings import (
    check_determinism,
    check_results,
    check_speed,
    check_spread,
    check_steps,
    scores_equal,
)
from toolwise.checks.reward.stored_rollouts import Results, StoredRollout
from toolwise.rewards.results import fault_result
from toolwise.types import EvaluateResult, StepOutput

MakeStored = Callable[..., list[StoredRollout]]


def scores(*values: float) -> Results:
    return [EvaluateResult(score=value) for value in values]


@pytest.fixture
def four(make_stored: MakeStored) -> list[StoredRollout]:
    """Two tasks, two rollouts each."""
    stored = make_stored()
    return [stored[0], stored[1], stored[4], stored[5]]


def test_valid_results_are_as_they_should_be(four: list[StoredRollout]) -> None:
    found = check_results(four, scores(0, 1, 0, 1))
    assert (found.verdict, found.says) == ("ok", "4 of 4 rollouts got a score")


def test_faults_are_counted_by_kind(four: list[StoredRollout]) -> None:
    results = [
        fault_result("timeout", "slow"),
        fault_result("memory", "big"),
        fault_result("timeout", "slow too"),
        None,
    ]
    found = check_results(four, results)
    assert found.verdict == "wrong"
    assert found.figures == {"scored": 0, "errors": {"timeout": 2, "memory": 1}, "not_valid": 0, "not_tried": 1}
    assert [detail.partition(",")[0] for detail in found.details] == ["timeout", "memory"]
    assert "slow too" not in "".join(found.details)


def test_not_being_sure_is_no_fault_unless_it_is_always_so(four: list[StoredRollout]) -> None:
    unsure = EvaluateResult(is_score_valid=False)
    assert check_results(four, [unsure, *scores(0, 1, 0)]).verdict == "ok"
    assert check_results(four, [unsure] * 4).verdict == "wrong"


def test_the_same_again_is_deterministic(four: list[StoredRollout]) -> None:
    found = check_determinism(four, scores(0, 1, 0.3, 1), scores(0, 1, 0.3, 1), scores(0, 1, 0.1 + 0.2, 1))
    assert found.verdict == "ok"


def test_step_rewards_must_be_the_same_again_as_well(four: list[StoredRollout]) -> None:
    def result(reward: float) -> EvaluateResult:
        return EvaluateResult(score=1.0, step_outputs=[StepOutput(step_index=0, base_reward=reward)])

    found = check_determinism(four[:1], [result(0.1)], [result(0.2)], [result(0.1)])
    assert (found.verdict, found.figures["differ_again"]) == ("wrong", 1)


def test_a_fault_that_comes_and_goes_is_not_deterministic(four: list[StoredRollout]) -> None:
    found = check_determinism(four[:1], scores(1), scores(1), [fault_result("exception", "sometimes")])
    assert found.verdict == "wrong"
    assert found.details == ("task-0/rollout-0: 1, then exception",)


def test_nothing_to_compare_is_said() -> None:
    assert check_determinism([], [], [], []).verdict == "warning"
    assert check_speed(0, 0.0).verdict == "warning"


def test_speed_says_what_it_means_for_a_step() -> None:
    found = check_speed(64, 0.5)
    assert found.verdict == "ok"
    assert found.figures == {"rollouts_per_s": 128.0, "seconds_per_128": 1.0}
    assert check_speed(64, 64.0).verdict == "warning"


def test_spread_is_told_within_groups_too(four: list[StoredRollout]) -> None:
    found = check_spread(four, scores(0, 1, 2, 2))
    assert found.verdict == "ok"
    assert found.figures["groups"] == 2
    assert found.figures["groups_without_spread"] == 1
    assert found.figures["share_equal"] == 0.5
    assert found.figures["std_within_groups"] == 0.25


@pytest.mark.parametrize(
    ("values", "best_gold", "verdict"),
    [
        ((1, 1, 1, 1), None, "wrong"),
        ((1, 1, 1, 1), 1.0, "wrong"),
        ((1, 1, 1, 1), 2.0, "warning"),
        ((0, 0, 1, 1), None, "wrong"),
        ((0, 0, 1, 1), 1.0, "wrong"),
        ((0, 0, 1, 1), 2.0, "warning"),
        ((0, 1, 0, 1), None, "ok"),
    ],
)
def test_no_spread_is_wrong_unless_gold_tells(
    values: tuple[float, ...], best_gold: float | None, verdict: str, four: list[StoredRollout]
) -> None:
    assert check_spread(four, scores(*values), best_gold).verdict == verdict


def test_without_groups_the_spread_within_them_is_not_known(four: list[StoredRollout]) -> None:
    found = check_spread([four[0], four[2]], scores(0, 1))
    assert (found.verdict, found.figures["groups"]) == ("warning", 0)


def steps(*indices: int | str) -> EvaluateResult:
    return EvaluateResult(score=1.0, step_outputs=[StepOutput(step_index=i, base_reward=0.1) for i in indices])


@pytest.mark.parametrize(
    ("indices", "verdict", "warnings"),
    [
        ((0, 1), "ok", {}),
        (("0", "1"), "ok", {}),
        ((0,), "warning", {"missing": 1}),
        ((0, 1, 2), "wrong", {"unmatched": 1}),
        ((0, 1, 1), "wrong", {"duplicate": 1}),
    ],
)
def test_steps_must_fit(
    indices: tuple[int | str, ...], verdict: str, warnings: dict[str, int], four: list[StoredRollout]
) -> None:
    found = check_steps([four[1]], [steps(*indices)])
    assert (found.verdict, found.figures["warnings"]) == (verdict, warnings)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_a_score_is_the_same_as_itself_and_never_as_none(score: float) -> None:
    assert scores_equal(score, score)
    assert scores_equal(None, None)
    assert not scores_equal(score, None)
