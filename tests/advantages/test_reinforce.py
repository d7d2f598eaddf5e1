"""REINFORCE++: normalization over the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages import ReinforcePlusPlus, compute_reinforce_plus_plus_outcome_advantage
from toolwise.advantages.arrays import CreditError
from toolwise.types import AnnotatedRollout, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]
REWARDS = st.lists(
    st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=3, max_size=3), min_size=2, max_size=5
)


def test_hand_worked() -> None:
    rewards = np.array([[0.0, 9.0, 1.0], [0.0, 0.0, 0.0]])
    mask = np.array([[1, 0, 1], [1, 0, 0]])
    # Sampled tokens: G = 1/2, 1 and 0; mean 1/2, sample variance (0 + 1/4 + 1/4) / 2 = 1/4.
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, 0.5)
    assert returns.tolist() == [[0.5, 0, 1], [0, 0, 0]]
    assert advantages == pytest.approx(np.array([[0, 0, 1], [-1, 0, 0]]), abs=1e-6)


def test_the_estimator_agrees_with_the_table(step: Step, rollout: Make) -> None:
    made = [rollout(1.0, "a", [step(0, tokens=1), step(1, tokens=1)]), rollout(0.0, "b", [step(0, tokens=1)])]
    found = ReinforcePlusPlus(gamma=0.5)(made).rollouts
    assert np.concatenate([a for r in found for a in r.advantages]) == pytest.approx([0, 1, -1], abs=1e-6)
    assert [s.return_to_go for r in found for s in r.steps] == [0.5, 1, 0]


@given(REWARDS, st.floats(-3, 3), st.floats(0.5, 4))
def test_shifting_the_scores_or_scaling_them_changes_nothing(rewards: Any, shift: float, scale: float) -> None:
    x = np.zeros((len(rewards), 3))
    x[:, -1] = [row[-1] for row in rewards]
    one, _ = compute_reinforce_plus_plus_outcome_advantage(x, np.ones_like(x))
    moved = scale * x
    moved[:, -1] += shift
    other, _ = compute_reinforce_plus_plus_outcome_advantage(moved, np.ones_like(x))
    if np.std(x[:, -1]) > 0.05:
        assert other == pytest.approx(one, abs=1e-3)


@given(REWARDS)
def test_inserting_a_tool_s_tokens_changes_nothing(rewards: Any) -> None:
    x = np.array(rewards)
    plain = compute_reinforce_plus_plus_outcome_advantage(x, np.ones_like(x), 0.9)
    wide, mask = np.full((len(x), 5), 8.0), np.zeros((len(x), 5))
    wide[:, [0, 2, 4]], mask[:, [0, 2, 4]] = x, 1
    found = compute_reinforce_plus_plus_outcome_advantage(wide, mask, 0.9)
    for a, b in zip(plain, found, strict=True):
        assert b[:, [0, 2, 4]].tolist() == a.tolist()
        assert not b[:, [1, 3]].any()


def test_equal_returns_are_exactly_zero(step: Step, rollout: Make) -> None:
    made = [rollout(0.1, str(i), [step(0, tokens=3)]) for i in range(7)]
    assert {x for r in ReinforcePlusPlus()(made).rollouts for a in r.advantages for x in a.tolist()} == {0.0}
    alone = ReinforcePlusPlus()([rollout(5.0, "a", [step(0, tokens=1)])]).rollouts
    assert alone[0].advantages[0].tolist() == [0.0]


def test_a_price_for_leaving_the_reference_with_each_token(step: Step, rollout: Make) -> None:
    made = rollout(1.0, steps=[step(0, tokens=2, logprob=-1.0)], ref=[[-2.0, -1.5]])
    found = ReinforcePlusPlus()([replace(made, kl_coef=0.1)]).rollouts[0]
    # Rewards −0.1 and 1 − 0.05; the first token's return holds both.
    assert found.returns is not None
    assert found.returns[0] == pytest.approx([0.85, 0.95])
    assert ReinforcePlusPlus().needs == frozenset()


def test_wrong_discounts_are_refused() -> None:
    with pytest.raises(CreditError, match="gamma is 3"):
        compute_reinforce_plus_plus_outcome_advantage(np.ones((1, 1)), np.ones((1, 1)), 3.0)
    with pytest.raises(CreditError, match="gamma is 3"):
        ReinforcePlusPlus(gamma=3.0)
    assert ReinforcePlusPlus()([]).rollouts == []
