"""GAE per token and per turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages import Gae, compute_gae_advantage_return
from toolwise.advantages.arrays import CreditError
from toolwise.types import AnnotatedRollout, StepData, StopReason

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]

NUMBERS = st.floats(-5, 5).map(lambda x: round(x, 3))
ROWS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=7), min_size=1, max_size=5)


def arrays(rows: list[list[Any]]) -> tuple[Any, Any, Any]:
    width = max(map(len, rows))
    rewards, values, mask = np.zeros((len(rows), width)), np.zeros((len(rows), width)), np.zeros((len(rows), width))
    for i, row in enumerate(rows):
        for t, (reward, value) in enumerate(row):
            rewards[i, t], values[i, t], mask[i, t] = reward, value, 1
    return rewards, values, mask


def slow(row: list[tuple[float, float]], gamma: float, lam: float) -> list[float]:
    """A_t as the paper writes it: the sum of (γλ)^l · δ_{t+l}."""
    values = [v for _, v in row] + [0.0]
    deltas = [r + gamma * values[t + 1] - values[t] for t, (r, _) in enumerate(row)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(row))) for t in range(len(row))]


def test_hand_worked() -> None:
    # γ = 1/2, λ = 1/2. Row: rewards 0, 0, 1; values 1/2, 1, 1/4.
    # δ = 0 + 1/2 − 1/2, 0 + 1/8 − 1, 1 − 1/4 = 0, −7/8, 3/4. A₂ = 3/4; A₁ = −7/8 + 3/16; A₀ = 0 + A₁/4.
    rewards, values = np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 1.0, 0.25]])
    advantages, returns = compute_gae_advantage_return(rewards, values, np.ones((1, 3)), 0.5, 0.5, whitened=False)
    assert advantages.tolist() == [[-11 / 64, -11 / 16, 0.75]]
    assert returns.tolist() == [[0.5 - 11 / 64, 1 - 11 / 16, 1.0]]


def test_whitened_hand_worked() -> None:
    rewards = np.array([[1.0, 0.0], [3.0, 0.0]])
    mask = np.array([[1, 0], [1, 0]])
    advantages, returns = compute_gae_advantage_return(rewards, np.zeros((2, 2)), mask, 1.0, 1.0)
    assert advantages == pytest.approx(np.array([[-1, 0], [1, 0]]) / np.sqrt(2), abs=1e-6)
    assert returns.tolist() == [[1, 0], [3, 0]]


@given(ROWS, st.floats(0, 1), st.floats(0, 1))
def test_agrees_with_the_sum_in_the_paper(rows: Any, gamma: float, lam: float) -> None:
    rewards, values, mask = arrays(rows)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam, whitened=False)
    for i, row in enumerate(rows):
        assert advantages[i, : len(row)] == pytest.approx(np.array(slow(row, gamma, lam)), abs=1e-8)
    assert returns == pytest.approx((advantages + values) * mask, abs=1e-12)


@given(ROWS, st.data())
def test_inserting_a_tool_s_tokens_changes_nothing(rows: Any, data: st.DataObject) -> None:
    rewards, values, mask = arrays(rows)
    plain = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    width, more = rewards.shape[1], data.draw(st.integers(1, 5))
    places = sorted(data.draw(st.permutations(range(width + more)))[:width])
    wide = [np.full((len(rows), width + more), fill) for fill in (0.0, 7.0, 0.0)]
    for target, source in zip(wide, (rewards, values, mask), strict=True):
        target[:, places] = source
    found = compute_gae_advantage_return(*wide, 0.9, 0.8)
    for a, b in zip(plain, found, strict=True):
        assert b[:, places].tolist() == a.tolist()
        assert not np.delete(b, places, axis=1).any()


@given(ROWS, st.floats(0.1, 10))
def test_scaling_rewards_and_values_scales_and_then_whitens_away(rows: Any, scale: float) -> None:
    rewards, values, mask = arrays(rows)
    one, _ = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8, whitened=False)
    many, _ = compute_gae_advantage_return(scale * rewards, scale * values, mask, 0.9, 0.8, whitened=False)
    assert many == pytest.approx(scale * one, abs=1e-7)
    if one[mask > 0].size > 1 and one[mask > 0].std() > 0.05:
        first, _ = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
        second, _ = compute_gae_advantage_return(scale * rewards, scale * values, mask, 0.9, 0.8)
        assert second == pytest.approx(first, abs=1e-3)


def test_a_perfect_critic_leaves_nothing_to_say() -> None:
    rewards = np.array([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    values = np.array([[0.25, 0.5, 1.0], [1.0, 2.0, 9.0]])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.5, 0.7)
    assert not advantages.any()
    assert returns.tolist() == (values * mask).tolist()


def test_a_bootstrap_value_stands_for_what_was_cut_off() -> None:
    rewards, values, mask = np.zeros((2, 2)), np.ones((2, 2)), np.array([[1, 1], [1, 0]])
    _, ended = compute_gae_advantage_return(rewards, values, mask, 0.5, 1.0, whitened=False)
    _, cut = compute_gae_advantage_return(rewards, values, mask, 0.5, 1.0, whitened=False, bootstrap=[4.0, 0.0])
    assert ended.tolist() == [[0, 0], [0, 0]]
    assert cut.tolist() == [[1, 2], [0, 0]]


@pytest.mark.parametrize(("gamma", "lam", "told"), [(2.0, 1.0, "gamma is 2.0"), (1.0, -1.0, "lam is -1.0")])
def test_wrong_discounts_are_refused(gamma: float, lam: float, told: str) -> None:
    with pytest.raises(CreditError, match=told):
        compute_gae_advantage_return(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1)), gamma, lam)


# As an estimator over rollouts.


def test_per_token_hand_worked(step: Step, rollout: Make) -> None:
    made = rollout(
        1.0, steps=[step(0, tokens=2), step(1, tokens=None), step(2, tokens=1)], values=[[0.5, 1.0], [], [0.25]]
    )
    found = Gae(gamma=0.5, lam=0.5, whiten=False)([made]).rollouts[0]
    # As in the table above: a step without tokens is not a time step.
    assert [a.tolist() for a in found.advantages] == [[-11 / 64, -11 / 16], [], [0.75]]
    assert found.returns is not None
    assert [r.tolist() for r in found.returns] == [[0.5 - 11 / 64, 1 - 11 / 16], [], [1.0]]
    assert [a.dtype for a in found.advantages] == [np.float32] * 3
    assert [s.advantage for s in found.steps] == [(-11 / 64 - 11 / 16) / 2, 0.0, 0.75]
    assert [s.return_to_go for s in found.steps] == [0.5 - 11 / 64, 0.0, 1.0]


def test_per_turn_hand_worked(step: Step, rollout: Make) -> None:
    steps = [step(0, tokens=2), step(1, tokens=3), step(2, tokens=1)]
    many = rollout(1.0, steps=steps, values=[[0.5, 9.0], [1.0, 9.0, 9.0], [0.25]])
    one = rollout(1.0, steps=steps, values=[[0.5], [1.0], [0.25]])
    for made in (many, one):
        found = Gae(gamma=0.5, lam=0.5, per="turn", whiten=False)([made]).rollouts[0]
        assert [a.tolist() for a in found.advantages] == [[-11 / 64] * 2, [-11 / 16] * 3, [0.75]]
        assert found.returns is not None
        assert [r.tolist() for r in found.returns] == [[0.5 - 11 / 64] * 2, [1 - 11 / 16] * 3, [1.0]]


def test_turns_weigh_alike_when_whitened_per_turn(step: Step, rollout: Make) -> None:
    made = [rollout(float(i), "g", [step(0, tokens=1 + 9 * i)], values=[[0.0]]) for i in range(2)]
    found = Gae(per="turn")(made).rollouts
    assert [r.steps[0].advantage for r in found] == pytest.approx([-1 / np.sqrt(2), 1 / np.sqrt(2)], abs=1e-6)


def test_base_rewards_come_with_the_last_token_of_their_step(step: Step, rollout: Make) -> None:
    steps = [step(0, tokens=2, base_reward=1.0), step(1, tokens=2, base_reward=4.0)]
    made = rollout(100.0, steps=steps, values=[[0, 0], [0, 0]])
    found = Gae(gamma=0.5, lam=1.0, whiten=False)([made]).rollouts[0]
    # The score is the sum of all, so 95 of 100 are left for the end: 0, 1, 0, 99 discounted.
    assert [a.tolist() for a in found.advantages] == [[0.5 * 25.75, 1 + 0.25 * 99], [49.5, 99]]
    add = Gae(gamma=0.0, lam=1.0, whiten=False, terminal_score="add")([made]).rollouts[0]
    assert [a.tolist() for a in add.advantages] == [[0, 1], [0, 104]]
    never = Gae(gamma=0.5, lam=1.0, whiten=False, terminal_score="never")([made]).rollouts[0]
    assert [a.tolist() for a in never.advantages] == [[0.5 + 0.5, 1 + 1.0], [2, 4]]


def test_the_reward_of_a_step_without_tokens_goes_to_the_token_before_it(step: Step, rollout: Make) -> None:
    steps = [
        step(0, tokens=None, base_reward=9.0),
        step(1, tokens=2, base_reward=1.0),
        step(2, tokens=None, base_reward=3.0),
    ]
    made = rollout(13.0, steps=steps, values=[[], [0, 0], []])
    found = Gae(gamma=1.0, lam=1.0, whiten=False)([made, made]).rollouts
    for r in found:  # rewards before the first decision are credited to no token
        assert [a.tolist() for a in r.advantages] == [[], [4, 4], []]


def test_a_rollout_cut_short_ends_or_is_bootstrapped(step: Step, rollout: Make) -> None:
    both = [
        rollout(0.0, steps=[step(0, tokens=2)], values=[[1.0, 2.0]], stop=stop)
        for stop in (StopReason.MAX_STEPS, StopReason.ANSWERED)
    ]
    ended = Gae(gamma=1.0, lam=1.0, whiten=False)(both).rollouts
    assert [r.advantages[0].tolist() for r in ended] == [[-1, -2], [-1, -2]]
    cut = Gae(gamma=1.0, lam=1.0, whiten=False, bootstrap_truncated=True)(both).rollouts
    assert [r.advantages[0].tolist() for r in cut] == [[1, 0], [-1, -2]]


def test_a_price_for_leaving_the_reference(step: Step, rollout: Make) -> None:
    made = rollout(1.0, steps=[step(0, tokens=2, logprob=-1.0)], values=[[0, 0]], ref=[[-1.5, -0.5]])
    found = Gae(gamma=0.0, lam=1.0, whiten=False)([replace(made, kl_coef=0.1)]).rollouts[0]
    # k1: log π − log π_ref = 1/2, −1/2.
    assert found.advantages[0] == pytest.approx([-0.05, 1 + 0.05])
    same = rollout(1.0, steps=[step(0, tokens=2)], values=[[0, 0]], ref=[[-1.5, -0.5]], old=[[-1.5, -0.5]])
    [again] = Gae(gamma=0.0, whiten=False)([replace(same, kl_coef=0.1)]).rollouts
    assert again.advantages[0].tolist() == [0, 1]


def test_whitening_is_over_all_tokens_of_the_batch(step: Step, rollout: Make) -> None:
    made = [rollout(float(i), "g", [step(0, tokens=1 + i)], values=[[0.0] * (1 + i)]) for i in range(3)]
    flat = np.concatenate([a for r in Gae()(made).rollouts for a in r.advantages])
    assert flat.mean() == pytest.approx(0, abs=1e-6)
    assert flat.var(ddof=1) == pytest.approx(1, abs=1e-5)


def test_what_it_needs_of_the_learner() -> None:
    assert Gae().needs == {"values"}


def test_without_values_or_with_too_few_it_says_so(step: Step, rollout: Make) -> None:
    steps = [step(0, tokens=2)]
    with pytest.raises(CreditError, match="rollout r has no values for its 1 steps; gae needs a critic"):
        Gae()([rollout(1.0, steps=steps)])
    with pytest.raises(CreditError, match="step 0: 1 values for 2 sampled tokens"):
        Gae()([rollout(1.0, steps=steps, values=[[1.0]])])
    with pytest.raises(CreditError, match="step 0: 0 values for 2 sampled tokens"):
        Gae(per="turn")([rollout(1.0, steps=steps, values=[[]])])
    with pytest.raises(CreditError, match="has no reference log-probs: the learner must annotate them"):
        Gae()([replace(rollout(1.0, steps=steps, values=[[1.0, 1.0]]), kl_coef=0.1)])
    with pytest.raises(CreditError, match="2 old and 1 reference log-probs for 2 sampled tokens"):
        Gae()([replace(rollout(1.0, steps=steps, values=[[1.0, 1.0]], ref=[[0.0]]), kl_coef=0.1)])
    with pytest.raises(CreditError, match="per is 'step'"):
        Gae(per="step")  # type: ignore[arg-type]


def test_nothing_in_nothing_out(step: Step, rollout: Make) -> None:
    assert Gae()([]).rollouts == []
    empty = Gae()([rollout(1.0, steps=[], values=[])]).rollouts[0]
    assert empty.advantages == ()
    mute = Gae(per="turn")([rollout(1.0, steps=[step(0, tokens=None)], values=[[]])]).rollouts[0]
    assert [a.tolist() for a in mute.advantages] == [[]]
