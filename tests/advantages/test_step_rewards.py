"""What a step earned, and where the final score goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolwise.advantages.arrays import CreditError
from toolwise.advantages.step_rewards import episodes_of
from toolwise.types import StepData

Step = Callable[..., StepData]


def rewards(lists: list[list[StepData]], scores: list[float], groups: Any, **settings: Any) -> list[float]:
    return episodes_of(lists, scores, groups, **settings).rewards.tolist()


def test_without_base_rewards_the_score_comes_at_the_last_step(step: Step) -> None:
    assert rewards([[step(), step()], [step()]], [1.0, 5.0], "gg") == [0, 1, 5]


def test_auto_adds_the_score_to_every_rollout_of_a_group_that_lacks_any_base_reward(step: Step) -> None:
    told, lacking = [step(base_reward=2.0), step(base_reward=3.0)], [step(base_reward=1.0), step()]
    # Group a lacks one reward, in its second rollout: both its rollouts get their scores. Group b lacks none.
    lists = [told, lacking, told]
    assert rewards(lists, [10.0, 20.0, 30.0], "aab") == [2, 13, 1, 20, 2, 3]


def test_always_and_never(step: Step) -> None:
    lists = [[step(base_reward=2.0), step(base_reward=3.0)], [step(), step()]]
    assert rewards(lists, [10.0, 20.0], "ab", terminal_score="always") == [2, 13, 0, 20]
    assert rewards(lists, [10.0, 20.0], "ab", terminal_score="never") == [2, 3, 0, 0]


def test_a_missing_base_reward_is_the_default_one(step: Step) -> None:
    lists = [[step(), step(base_reward=0.0), step()]]
    assert rewards(lists, [1.0], "g", default_step_reward=-0.5) == [-0.5, 0, 0.5]
    assert rewards(lists, [1.0], "g", default_step_reward=-0.5, terminal_score="never") == [-0.5, 0, -0.5]


def test_a_base_reward_of_zero_is_not_a_missing_one(step: Step) -> None:
    assert rewards([[step(base_reward=0.0)]], [7.0], "g") == [0]


def test_an_invalid_action_is_charged_for(step: Step) -> None:
    bad, fine = step(info={"is_action_valid": False}, base_reward=1.0), step(info={"is_action_valid": True})
    assert rewards([[bad, fine, step()]], [2.0], "g", invalid_action_penalty=0.1) == pytest.approx([0.9, 0, 2])
    assert rewards([[bad, fine, step()]], [2.0], "g") == [1, 0, 2]


def test_a_rollout_without_steps_has_a_score_and_no_reward(step: Step) -> None:
    found = episodes_of([[], [step()], []], [1.0, 2.0, 3.0], "ggh")
    assert found.rewards.tolist() == [2]
    assert found.lengths.tolist() == [0, 1, 0]
    assert found.of_step.tolist() == [1]
    assert episodes_of([], [], []).rewards.tolist() == []


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_scores_and_rewards_must_be_finite(step: Step, odd: float) -> None:
    with pytest.raises(CreditError, match="final score of rollout 1 is not a finite number"):
        episodes_of([[step()], [step()]], [1.0, odd], "gg")
    with pytest.raises(CreditError, match="base_reward of step 4"):
        episodes_of([[step(), step(4, base_reward=odd)]], [1.0], "g")


def test_what_does_not_fit_together_is_counted_out(step: Step) -> None:
    with pytest.raises(CreditError, match="1 rollouts, 2 final scores and 1 group ids"):
        episodes_of([[step()]], [1.0, 2.0], "g")
    with pytest.raises(CreditError, match="terminal_score is 'sometimes'; choose one of auto, always, never"):
        episodes_of([[step()]], [1.0], "g", terminal_score="sometimes")  # type: ignore[arg-type]


def test_statistics_are_double_precision(step: Step) -> None:
    assert episodes_of([[step(base_reward=0.1)]], [1.0], "g").rewards.dtype == np.float64
