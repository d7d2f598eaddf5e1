"""Step rewards, and where the final score goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages.arrays import CreditError
from toolwise.advantages.step_rewards import Episodes, episodes_of, totals_before_costs
from toolwise.types import AnnotatedRollout, RewardSettings, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]


def rewards(lists: list[list[StepData]], scores: list[float], groups: Any, **settings: Any) -> list[float]:
    return episodes_of(lists, scores, groups, **settings).rewards.tolist()


def test_without_base_rewards_the_score_comes_at_the_last_step(step: Step) -> None:
    assert rewards([[step(), step()], [step()]], [1.0, 5.0], "gg") == [0, 1, 5]


def test_the_last_step_gets_what_the_step_rewards_leave_of_the_score(step: Step) -> None:
    """For any steps with rewards, in any group: a final score and a cost on each call, by hand."""
    right = [step(base_reward=-0.25), step(base_reward=-0.25), step(base_reward=0.0)]
    partly, none = [step(base_reward=-0.25), step()], [step(), step()]
    found = episodes_of([right, partly, none], [0.5, -0.25, 1.0], "aab")
    assert found.rewards.tolist() == [-0.25, -0.25, 1.0, -0.25, 0.0, 0.0, 1.0]
    assert found.scores.tolist() == [0.5, -0.25, 1.0]


def test_a_score_on_top_of_the_step_rewards_is_seen_by_all(step: Step) -> None:
    lists = [[step(base_reward=2.0), step(base_reward=3.0)], [step(), step()]]
    found = episodes_of(lists, [10.0, 20.0], "ab", terminal_score="add")
    assert found.rewards.tolist() == [2, 13, 0, 20]
    assert found.scores.tolist() == [15, 20]


def test_never_leaves_the_score_out_of_the_rewards(step: Step) -> None:
    lists = [[step(base_reward=2.0), step(base_reward=3.0)], [step(), step()]]
    found = episodes_of(lists, [10.0, 20.0], "ab", terminal_score="never")
    assert found.rewards.tolist() == [2, 3, 0, 0]
    assert found.scores.tolist() == [10, 20]


def test_steps_that_add_up_to_the_score_leave_exactly_nothing(step: Step) -> None:
    """0.1 + 0.2 + 0.3 is not 0.6 in floating point; the last step still gets exactly its own reward."""
    lists = [[step(base_reward=x) for x in (0.1, 0.2, 0.3)], [step(base_reward=x) for x in (60.0, 40.0, 0.0)]]
    assert rewards(lists, [0.6, 100.0], "gg") == [0.1, 0.2, 0.3, 60.0, 40.0, 0.0]


def test_a_score_that_is_missing_is_the_sum_of_the_step_rewards(step: Step) -> None:
    lists = [[step(base_reward=2.0), step(), step(base_reward=-0.5)], [step()]]
    found = episodes_of(lists, [None, 1.0], "gg")
    assert found.scores.tolist() == [1.5, 1.0]
    assert found.rewards.tolist() == [2.0, 0.0, -0.5, 1.0]
    with pytest.raises(CreditError, match="final score of rollout 1 is not a finite number"):
        episodes_of(lists, [None, None], "gg")


def test_a_missing_base_reward_is_the_default_one_on_top_of_the_score(step: Step) -> None:
    lists = [[step(), step(base_reward=0.25), step()]]
    found = episodes_of(lists, [1.0], "g", default_step_reward=-0.5)
    assert found.rewards.tolist() == [-0.5, 0.25, 0.25]  # 1 − 0.25 is left for the last step, which then pays 0.5
    assert found.scores.tolist() == [0.0]
    assert rewards(lists, [1.0], "g", default_step_reward=-0.5, terminal_score="never") == [-0.5, 0.25, -0.5]
    assert rewards(lists, [1.0], "g", default_step_reward=-0.5, terminal_score="add") == [-0.5, 0.25, 0.5]


def test_a_base_reward_of_zero_is_not_a_missing_one(step: Step) -> None:
    assert rewards([[step(base_reward=0.0)]], [7.0], "g", default_step_reward=-1.0) == [7]


def test_an_invalid_action_is_charged_to_its_step_and_to_the_total(step: Step) -> None:
    bad, fine = step(info={"is_action_valid": False}, base_reward=1.0), step(info={"is_action_valid": True})
    found = episodes_of([[bad, fine, step()], [fine]], [2.0, 2.0], "gg", invalid_action_penalty=0.1)
    assert found.rewards.tolist() == pytest.approx([0.9, 0, 1, 2])
    assert found.scores.tolist() == pytest.approx([1.9, 2])
    assert rewards([[bad, fine, step()]], [2.0], "g") == [1, 0, 1]


def test_a_rollout_without_steps_has_a_score_and_no_reward(step: Step) -> None:
    found = episodes_of([[], [step()], []], [1.0, 2.0, 3.0], "ggh")
    assert found.rewards.tolist() == [2]
    assert found.lengths.tolist() == [0, 1, 0]
    assert found.rollout_of_step.tolist() == [1]
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
    with pytest.raises(CreditError, match="terminal_score is 'sometimes'; choose one of remainder, add, never"):
        episodes_of([[step()]], [1.0], "g", terminal_score="sometimes")  # type: ignore[arg-type]


def test_statistics_are_double_precision(step: Step) -> None:
    assert episodes_of([[step(base_reward=0.1)]], [1.0], "g").rewards.dtype == np.float64


# Properties.

REWARD = st.none() | st.floats(-100, 100)
BATCH = st.lists(
    st.tuples(st.lists(st.tuples(REWARD, st.booleans()), min_size=1, max_size=6), st.floats(-100, 100)),
    min_size=1,
    max_size=6,
)


def made(step: Step, batch: Any, **settings: Any) -> Episodes:
    lists = [[step(base_reward=r, info={"is_action_valid": ok}) for r, ok in steps] for steps, _ in batch]
    return episodes_of(lists, [score for _, score in batch], ["g"] * len(batch), **settings)


def sums(episodes: Episodes) -> Any:
    return np.bincount(episodes.rollout_of_step, episodes.rewards, len(episodes.lengths))


@given(batch=BATCH)
def test_the_rewards_of_a_rollout_add_up_to_its_score(step: Step, batch: Any) -> None:
    found = made(step, batch)
    np.testing.assert_allclose(sums(found), [score for _, score in batch], atol=1e-9)
    np.testing.assert_array_equal(found.scores, [score for _, score in batch])


@given(batch=BATCH, default=st.floats(-5, 5), penalty=st.floats(0, 5), terminal=st.sampled_from(["remainder", "add"]))
def test_steps_and_total_stay_together_whatever_is_charged(
    step: Step, batch: Any, default: float, penalty: float, terminal: str
) -> None:
    settings = {"terminal_score": terminal, "default_step_reward": default, "invalid_action_penalty": penalty}
    found = made(step, batch, **settings)
    np.testing.assert_allclose(sums(found), found.scores, atol=1e-9)
    given_rewards = [sum(r for r, _ in steps if r is not None) for steps, _ in batch]
    extra = [
        sum(default * (r is None) - penalty * (not ok) for r, ok in steps)
        + score
        + (given if terminal == "add" else 0.0)
        for (steps, score), given in zip(batch, given_rewards, strict=True)
    ]
    np.testing.assert_allclose(found.scores, extra, atol=1e-9)


@given(steps=st.lists(st.floats(-100, 100), min_size=1, max_size=8))
def test_a_score_that_is_the_sum_of_its_steps_changes_no_reward(step: Step, steps: list[float]) -> None:
    found = made(step, [([(r, True) for r in steps], sum(steps))])
    assert found.rewards.tolist() == steps


@given(batch=BATCH, seed=st.randoms(use_true_random=False))
def test_the_order_of_rollouts_changes_nothing(step: Step, batch: Any, seed: Any) -> None:
    order = list(range(len(batch)))
    seed.shuffle(order)
    plain, other = made(step, batch), made(step, [batch[i] for i in order])
    parts = np.split(plain.rewards, np.cumsum(plain.lengths)[:-1])
    np.testing.assert_array_equal(other.rewards, np.concatenate([parts[i] for i in order]))


@given(batch=BATCH)
def test_step_rewards_only_move_what_a_rollout_earned(step: Step, batch: Any) -> None:
    """Undiscounted, the first step's return is the score, with or without step rewards."""
    bare = [([(None, ok) for _, ok in steps], score) for steps, score in batch]
    np.testing.assert_allclose(sums(made(step, batch)), sums(made(step, bare)), atol=1e-9)


@given(batch=BATCH, terminal=st.sampled_from(["remainder", "add", "never"]), default=st.sampled_from([0.0, -0.5]))
def test_whole_rollouts_are_compared_by_the_same_totals(
    step: Step, rollout: Make, batch: Any, terminal: str, default: float
) -> None:
    settings: Any = {"terminal_score": terminal, "default_step_reward": default}
    scored = [rollout(score, steps=[step(base_reward=r) for r, _ in steps]).scored for steps, score in batch]
    found = totals_before_costs(scored, RewardSettings(**settings))
    np.testing.assert_array_equal(found, made(step, batch, **settings).scores)


def test_whole_rollouts_ask_nothing_of_their_steps_unless_they_must(step: Step, rollout: Make) -> None:
    """An environment with non-numeric rewards does not stop GRPO, which reads only scores."""
    odd = [rollout(score, steps=[step(base_reward=float("nan"))]).scored for score in (1.0, 0.0)]
    assert totals_before_costs(odd, RewardSettings()).tolist() == [1.0, 0.0]
    assert totals_before_costs(odd, None).tolist() == [1.0, 0.0]
