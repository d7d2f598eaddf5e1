"""Reward results: numbers of all common types are accepted, unknown fields are rejected."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from toolwise.types.results import EvaluateResult, MetricResult, StepOutput, unwrap_scalar

NUMBERS = [
    True,
    1,
    1.0,
    np.bool_(True),
    np.float32(1.0),
    np.int64(1),
    np.array(1.0),
    np.array([1.0]),
    np.array([[True]]),
    torch.tensor(1.0),
    torch.tensor([1.0]),
    torch.tensor(1.0, dtype=torch.bfloat16),
    torch.tensor(1.0, requires_grad=True),
    torch.tensor(True),
]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_one_element_of_numpy_or_torch_is_a_number_everywhere(value: Any) -> None:
    result = EvaluateResult(
        score=value,
        metrics={"plain": value, "named": MetricResult(score=value)},
        step_outputs=[StepOutput(step_index=0, base_reward=value, metrics={"x": value})],
    )
    assert (result.score, type(result.score)) == (1.0, float)
    assert result.metrics == {"plain": MetricResult(score=1.0), "named": MetricResult(score=1.0)}
    assert result.step_outputs is not None
    assert result.step_outputs[0].base_reward == 1.0
    assert EvaluateResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), torch.ones(2), np.array("text"), 1j])
def test_what_is_no_single_number_stays_what_it_is(value: Any) -> None:
    assert unwrap_scalar(value) is value


def test_metrics_may_be_plain_numbers_beside_full_ones() -> None:
    result = EvaluateResult(score=0.5, metrics={"correct": 1.0, "calls": {"score": 3, "reason": "many"}})
    assert result.metrics == {"correct": MetricResult(score=1.0), "calls": MetricResult(score=3.0, reason="many")}


@pytest.mark.parametrize("kind", [EvaluateResult, StepOutput, MetricResult])
def test_a_misspelt_field_is_an_error_and_not_dropped(kind: Any) -> None:
    with pytest.raises(ValidationError, match="scroe"):
        kind(**{"step_index": 0, "base_reward": 1.0} if kind is StepOutput else {"score": 1.0}, scroe=1.0)


def test_step_rewards_without_a_score_add_up_to_one() -> None:
    steps = [StepOutput(step_index=i, base_reward=r) for i, r in ((0, 0.25), (1, 0.5), ("1", 9.0))]
    assert EvaluateResult(step_outputs=steps).score == 0.75  # the first entry per index counts
    assert EvaluateResult(step_outputs=steps, score=2.0).score == 2.0
    assert EvaluateResult(step_outputs=steps, is_score_valid=False).score is None
    assert EvaluateResult(step_outputs=[]).score is None


def test_neither_numpy_nor_torch_is_imported_for_it() -> None:
    code = (
        "import sys\nfrom toolwise.rewards.results import read_result\n"
        "assert read_result(True).score == 1.0\n"
        "assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_invalid_metric_says_nothing_about_correctness() -> None:
    assert EvaluateResult(score=0.0, metrics={"correct": 1.0}).correctness == 1.0
    invalid = {"score": 1.0, "is_score_valid": False}
    assert EvaluateResult(score=0.0, metrics={"correct": invalid}).correctness == 0.0
