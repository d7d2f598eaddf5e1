"""Rewards of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from toolwise.advantages.step_rewards import token_rewards_of
from toolwise.types import AnnotatedRollout, RewardSettings, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]


def test_steps_lie_end_to_end_with_rewards_at_their_last_tokens(step: Step, rollout: Make) -> None:
    first = rollout(5.0, "a", [step(0, tokens=2, base_reward=1.0), step(1, tokens=1)])
    second = rollout(7.0, "b", [step(0, tokens=1)])
    found = token_rewards_of([first, second], RewardSettings())
    assert found.rewards.tolist() == [0, 1, 4, 7]
    assert found.counts.tolist() == [2, 1, 1]
    assert found.tokens_per_rollout.tolist() == [3, 1]
    assert found.rollout_of_step.tolist() == [0, 0, 1]


def test_a_reward_never_crosses_into_another_rollout(step: Step, rollout: Make) -> None:
    mute = rollout(9.0, "b", [step(0, tokens=None)])
    both = [rollout(5.0, "a", [step(0, tokens=1)]), mute]
    assert token_rewards_of(both, RewardSettings()).rewards.tolist() == [5]


def test_the_price_is_on_every_token(step: Step, rollout: Make) -> None:
    made = rollout(1.0, steps=[step(0, tokens=2, logprob=-1.0), step(1, tokens=None)], ref=[[-3.0, -1.0], []])
    found = token_rewards_of([replace(made, kl_coef=0.5)], RewardSettings())
    assert found.rewards == pytest.approx([-1.0, 1.0])


def test_nothing_in_nothing_out() -> None:
    assert token_rewards_of([], RewardSettings()).rewards.tolist() == []
