"""`@reward_function`: finding and checking functions, and parsing their return values."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolwise.errors import ConfigError, RewardError
from toolwise.rewards import Reward, reward_function
from toolwise.rewards.results import read_result, read_results
from toolwise.types import EvaluateResult, EvaluationFault, MetricResult, StepOutput


def plain(messages: Any, ground_truth: Any) -> float:
    return 1.0


def open_ended(messages: Any, ground_truth: Any, **kwargs: Any) -> float:
    return 1.0


def priced(messages: Any, ground_truth: Any, price: float = 0.1, *, floor: float = 0.0) -> float:
    return 1.0


# Finding and checking.


def test_the_decorator_gives_the_function_back_and_reads_its_mode() -> None:
    assert reward_function(plain) is plain

    @reward_function
    def many(rollouts_messages: Any, ground_truths: Any) -> list[float]:
        return []

    assert Reward.of(plain).mode == "pointwise"
    assert Reward.of(many).mode == "batch"


def test_the_mode_may_be_given() -> None:
    @reward_function(mode="batch")
    def judged(conversations: Any, truths: Any) -> list[float]:
        return []

    assert Reward.of(judged).mode == "batch"


def test_an_unmarked_function_serves_as_well() -> None:
    reward = Reward.of(plain)
    assert (reward.name, reward.mode, dict(reward.kwargs)) == ("plain", "pointwise", {})
    assert reward.function is plain


def test_methods_and_callable_objects_serve() -> None:
    class Judge:
        def __call__(self, messages: Any, ground_truth: Any) -> float:
            return 0.5

        def judge(self, rollouts_messages: Any, ground_truths: Any) -> list[float]:
            return []

    assert Reward.of(Judge()).name == "Judge"
    assert Reward.of(Judge().judge).mode == "batch"


def test_a_reference_is_loaded_and_keeps_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(messages, ground_truth):\n    return 2.0\n", encoding="utf-8")
    reward = Reward.of(f"{file}:score")
    assert reward.name == f"{file}:score"
    assert reward.function([], None) == 2.0
    assert Reward.of("toolwise.demo.reward:small_world_reward").mode == "pointwise"


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "constant.py"
    file.write_text("score = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is a int, not a function"):
        Reward.of(f"{file}:score")


def test_functions_that_cannot_be_called_with_two_values_are_refused() -> None:
    def one(messages: Any) -> float:
        return 0.0

    def none() -> float:
        return 0.0

    def by_name(messages: Any, *, ground_truth: Any) -> float:
        return 0.0

    def one_and_more(messages: Any, **kwargs: Any) -> float:
        return 0.0

    for function in (one, none, by_name, one_and_more):
        with pytest.raises(RewardError, match=r"must take \(messages, ground_truth\)") as caught:
            Reward.of(function)
        assert function.__name__ in str(caught.value)


def test_a_function_that_does_not_say_what_it_takes_is_refused() -> None:
    with pytest.raises(RewardError, match="its signature cannot be inspected"):
        Reward.of(max)


def test_arguments_from_the_configuration_are_checked_against_the_signature_at_once() -> None:
    assert Reward.of(priced, {"price": 0.2, "floor": 1.0}).kwargs == {"price": 0.2, "floor": 1.0}
    assert Reward.of(open_ended, {"anything": 1}).kwargs == {"anything": 1}
    with pytest.raises(RewardError, match="takes no argument 'prise'"):
        Reward.of(priced, {"prise": 0.2})
    with pytest.raises(RewardError, match="takes no argument 'price'"):
        Reward.of(plain, {"price": 0.2})


@pytest.mark.parametrize("name", ["messages", "ground_truth"])
def test_the_two_values_of_a_reward_cannot_be_given_as_arguments(name: str) -> None:
    for function in (plain, open_ended):
        with pytest.raises(RewardError, match=f"takes no argument '{name}'"):
            Reward.of(function, {name: 1})


def test_a_finished_reward_takes_further_arguments_and_is_itself_left_alone() -> None:
    reward = Reward.of(priced, {"price": 0.2})
    assert Reward.of(reward) == reward
    more = Reward.of(reward, {"floor": 0.5})
    assert more.kwargs == {"price": 0.2, "floor": 0.5}
    assert reward.kwargs == {"price": 0.2}
    with pytest.raises(RewardError, match="takes no argument 'flor'"):
        Reward.of(reward, {"flor": 0.5})


def test_arguments_are_copied_from_the_caller() -> None:
    kwargs = {"price": 0.2}
    reward = Reward.of(priced, kwargs)
    kwargs["price"] = 9.0
    assert reward.kwargs == {"price": 0.2}


def test_of_all_that_is_at_hand_a_function_gets_what_it_has_a_parameter_for() -> None:
    given = {"price": 1, "step": 3, "criteria": "x"}
    assert Reward.of(plain).signature.accepted_kwargs(given) == {}
    assert Reward.of(priced).signature.accepted_kwargs(given) == {"price": 1}
    assert Reward.of(open_ended).signature.accepted_kwargs(given) == given
    assert Reward.of(open_ended).signature.accepted_kwargs({"ground_truth": 1, "step": 2}) == {"step": 2}


# Parsing return values.


@pytest.mark.parametrize(
    "value",
    [
        *(1, 0.25, -3.5, True, False, Fraction(1, 4), Decimal("0.25")),
        *(np.float64(0.5), np.float32(0.5), np.int64(2), np.bool_(True), np.array(0.5), np.array([0.5])),
        *(torch.tensor(0.5), torch.tensor([True]), torch.tensor(2)),
    ],
)
def test_numbers_are_scores(value: Any) -> None:
    result = read_result(value)
    assert result.score == float(value.item() if hasattr(value, "item") else value)
    assert type(result.score) is float
    assert result.has_valid_score


def test_zero_is_a_score_and_not_a_fault() -> None:
    assert read_result(0).has_valid_score
    assert read_result(0.0).score == 0.0


def test_a_dictionary_is_a_result() -> None:
    result = read_result(
        {
            "score": 0.5,
            "reason": "half right",
            "metrics": {"correct": {"score": 1.0}},
            "step_outputs": [{"step_index": 0, "base_reward": 0.1}],
        }
    )
    assert result.has_valid_score
    assert result.metrics == {"correct": MetricResult(score=1.0)}
    assert result.step_outputs == [StepOutput(step_index=0, base_reward=0.1)]


def test_a_result_is_passed_on_as_it_is() -> None:
    given = EvaluateResult(score=0.5, reason="so")
    assert read_result(given) is given


def test_an_author_may_say_that_there_is_no_score() -> None:
    abstained = EvaluateResult(is_score_valid=False, reason="the judge was asleep")
    assert read_result(abstained) is abstained
    assert not abstained.has_valid_score
    failed = EvaluateResult(error=EvaluationFault(kind="judge", message="asleep"))
    assert read_result(failed) is failed


@pytest.mark.parametrize("value", [None, "0.5", b"1", [1.0], (1.0,), object(), np.ones(2), torch.ones(2), 1 + 2j])
def test_what_is_no_number_is_a_fault_of_type(value: Any) -> None:
    result = read_result(value)
    assert result.error is not None
    assert result.error.kind == "bad_type"
    assert "must return a number" in result.error.message
    assert result.score is None
    assert not result.is_score_valid
    assert not result.has_valid_score


@pytest.mark.parametrize("value", [{}, {"score": None}, {"step_outputs": []}, EvaluateResult()])
def test_a_result_without_a_score_is_a_fault_and_not_silently_left_out(value: Any) -> None:
    result = read_result(value)
    assert result.error is not None
    assert result.error.kind == "bad_type"
    assert "no score" in result.error.message


@pytest.mark.parametrize("value", [{"score": "high"}, {"score": 1.0, "metrics": [1]}, {"score": [1.0]}])
def test_a_dictionary_that_is_no_result_is_a_fault_that_names_the_field(value: dict[str, Any]) -> None:
    result = read_result(value)
    assert result.error is not None
    assert result.error.kind == "bad_type"
    assert result.error.message.startswith(("score:", "metrics:"))
    assert "\n" not in result.error.message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"scores": 1.0}, "the result has an unknown key 'scores'; did you mean 'score'?"),
        (
            {"score": 1.0, "extra": 2},
            "the result has an unknown key 'extra'; known keys: score, is_score_valid, reason",
        ),
        (
            {"score": 1.0, "step_outputs": [{"step_index": 0, "base_reward": 1.0, "reasons": "x"}]},
            "step_outputs.0 has an unknown key 'reasons'; did you mean 'reason'?",
        ),
        ({"score": 1.0, "metrics": {"m": {"score": 1, "valid": True}}}, "metrics.m has an unknown key 'valid'"),
    ],
)
def test_an_unknown_key_is_named(value: dict[str, Any], said: str) -> None:
    result = read_result(value)
    assert result.error is not None
    assert result.error.kind == "bad_type"
    assert result.error.message.startswith(said)
    assert not result.has_valid_score


def test_step_rewards_without_a_score_are_a_result() -> None:
    steps = [{"step_index": 0, "base_reward": np.float32(0.25)}, {"step_index": 1, "base_reward": True}]
    result = read_result({"step_outputs": steps})
    assert result.has_valid_score
    assert result.score == 1.25


def test_a_metric_may_be_a_number_and_must_be_finite() -> None:
    assert read_result({"score": 1.0, "metrics": {"correct": 1.0}}).metrics == {"correct": MetricResult(score=1.0)}
    result = read_result({"score": 1.0, "metrics": {"correct": math.nan}})
    assert result.error is not None
    assert result.error.message == "the metric 'correct' is nan"


def spoilt(score: float) -> EvaluateResult:
    result = EvaluateResult(score=1.0)
    result.score = score
    return result


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        10**400,
        {"score": math.nan},
        {"score": -math.inf},
        {"score": 10**400},
        spoilt(math.nan),
        spoilt(math.inf),
        {"step_outputs": [{"step_index": 0, "base_reward": math.nan}]},
        EvaluateResult(step_outputs=[StepOutput(step_index=0, base_reward=math.inf)]),
    ],
)
def test_what_is_not_finite_is_a_fault_of_its_own(value: Any) -> None:
    result = read_result(value)
    assert result.error is not None
    assert result.error.kind == "non_finite"
    assert result.score is None
    assert not result.has_valid_score


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_score(reward: float) -> None:
    """The aligner reports it; it also reaches the aligner from a worker's answer."""
    result = read_result({"score": 1.0, "step_outputs": [{"step_index": 0, "base_reward": reward}]})
    assert result.has_valid_score
    again = read_result(json.loads(result.model_dump_json()))
    assert again.has_valid_score
    assert [str(output.base_reward) for output in again.step_outputs or ()] == [str(reward)]


def test_without_a_score_a_step_that_is_not_finite_is_named() -> None:
    result = read_result({"step_outputs": [{"step_index": 3, "base_reward": math.nan}]})
    assert result.reason == "the base_reward of step 3 is nan, and there is no score"


def test_a_batch_gives_one_result_each_in_order() -> None:
    results = read_results([1.0, None, {"score": 0.5}, EvaluateResult(score=2.0)], 4)
    assert [r.score for r in results] == [1.0, None, 0.5, 2.0]
    assert [r.error.kind if r.error else None for r in results] == [None, "bad_type", None, None]
    assert [r.score for r in read_results((3, 4), 2)] == [3.0, 4.0]


@pytest.mark.parametrize(
    "values", [np.array([1.0, 0.0]), np.array([True, False]), torch.tensor([1.0, 0.0]), [np.bool_(True), False]]
)
def test_a_batch_may_be_an_array(values: Any) -> None:
    assert [r.score for r in read_results(values, 2)] == [1.0, 0.0]
    assert {r.error.kind for r in read_results(values, 3) if r.error} == {"wrong_length"}


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0, 3.0]])
def test_a_batch_of_the_wrong_length_is_a_fault_for_all(values: list[float]) -> None:
    results = read_results(values, 2)
    assert [r.error.kind for r in results if r.error] == ["wrong_length", "wrong_length"]
    assert f"{len(values)} results for 2 rollouts" in (results[0].reason or "")


@pytest.mark.parametrize("values", [None, 1.0, "ab", b"ab", {"score": 1.0}, iter([1.0, 2.0])])
def test_a_batch_that_is_no_list_is_a_fault_for_all(values: Any) -> None:
    results = read_results(values, 2)
    assert [r.error.kind for r in results if r.error] == ["bad_type", "bad_type"]


def test_a_file_with_one_marked_function_needs_no_name(tmp_path: Path) -> None:
    file = tmp_path / "only.py"
    file.write_text(
        "from toolwise import reward_function\n\n\ndef plain(messages, ground_truth):\n    return 0\n\n\n"
        "@reward_function\ndef marked(messages, ground_truth):\n    return 1\n"
    )
    assert Reward.of(str(file)).function(None, None) == 1


@pytest.mark.parametrize(("marks", "said"), [(0, "it has none"), (2, "it has first, second: choose one")])
def test_a_file_with_none_or_several_marked_functions_must_say_which(tmp_path: Path, marks: int, said: str) -> None:
    file = tmp_path / f"with_{marks}.py"
    mark = "@reward_function\n" if marks else ""
    body = "(messages, ground_truth):\n    return 1\n\n\n"
    file.write_text(
        f"from toolwise import reward_function\n\n\n{mark}def first{body}{mark}def second{body}",
    )
    with pytest.raises(ConfigError, match=said):
        Reward.of(str(file))
