"""Values of thinking levels, worked by hand: scores, advantages and weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from toolwise.advantages.level_values import (
    copo_weights,
    diversity_bonus,
    level_advantages,
    level_scores,
)

nan = np.nan


def test_a_hand_worked_group() -> None:
    u = np.array([[-1.0, -2.0, -3.0, -2.0]])
    assert level_advantages(u)[0, 0] == 1.0
    assert level_advantages(u)[0, 2] == -1.0
    # sample variance: (1 + 0 + 1 + 0) / 3
    assert level_advantages(u, "mean_std_norm")[0, 0] == pytest.approx(1 / (np.sqrt(2 / 3) + 1e-6))


def test_a_level_that_is_not_there_is_left_out() -> None:
    u = np.array([[-1.0, nan, -3.0, nan]])
    assert level_advantages(u)[0, 0] == 1.0
    assert np.isnan(level_advantages(u)[0]).tolist() == [False, True, False, True]


def test_alone_or_all_alike_is_exactly_nothing() -> None:
    u = np.array([[nan, -1.3, nan, nan], [0.1, 0.1, 0.1, 0.1]])
    assert level_advantages(u, "mean_std_norm")[[0, 1], [1, 2]].tolist() == [0.0, 0.0]


@given(hnp.arrays(np.float64, (5, 4), elements=st.floats(-20, 0)))
def test_advantages_of_a_step_add_up_to_nothing_and_know_no_other_step(u: np.ndarray) -> None:
    found = level_advantages(u)
    assert np.abs(found.sum(1)).max() < 1e-9
    np.testing.assert_array_equal(found[2], level_advantages(u[2:3])[0])


def test_what_is_compared() -> None:
    logprobs, entropies = np.array([[-1.0, -2.0]]), np.array([[0.5, 0.25]])
    assert level_scores(logprobs, entropies, "logprob").tolist() == [[-1.0, -2.0]]
    np.testing.assert_allclose(level_scores(logprobs, entropies, "confidence"), np.exp(logprobs))
    assert level_scores(logprobs, entropies, "neg_entropy").tolist() == [[-0.5, -0.25]]


def test_a_price_inside_the_four_says_something_and_a_common_one_nothing() -> None:
    u, tokens = np.array([[-1.0, -1.0, -1.0, -1.0]]), np.array([[0.0, 2.0, 4.0, 6.0]])
    assert level_advantages(u - 0.1 * tokens)[0, 0] == pytest.approx(0.3)
    assert level_advantages(u - 0.1 * tokens)[0, 3] == pytest.approx(-0.3)
    assert level_advantages(u - 5.0)[0, 0] == 0.0


def test_diversity_is_what_is_missing_from_the_groups_own_steps() -> None:
    found = diversity_bonus([1, 1, 1, 4, None, 2], ["a", "a", "a", "a", "a", "b"])
    np.testing.assert_allclose(found["a"], [0.25, 1.0, 1.0, 0.75])
    np.testing.assert_allclose(found["b"], [1.0, 0.0, 1.0, 1.0])
    assert diversity_bonus([None], ["c"])["c"].tolist() == [1.0] * 4


def test_weights_by_hand() -> None:
    u = np.log(np.array([[0.1, 0.2, 0.3, 0.5]]))
    n = np.array([0.0, 0.25, 0.5, 1.0])
    np.testing.assert_allclose(copo_weights(u)[0], np.exp(2 * n) / np.exp(2 * n).mean())


def test_noise_gets_no_weight_and_a_step_that_is_not_whole_none_at_all() -> None:
    u = np.array([[-1.0, -1.01, -1.02, -1.04], [-1.0, nan, -2.0, -3.0]])
    found = copo_weights(u)
    assert found[0].tolist() == [1.0] * 4
    assert np.isnan(found[1]).all()
    assert copo_weights(u, floor=0.0)[0, 0] > 1.5


@given(hnp.arrays(np.float64, (4, 4), elements=st.floats(-800, 0)))
def test_weights_have_a_mean_of_one_whatever_the_scale(u: np.ndarray) -> None:
    found = copo_weights(u)
    np.testing.assert_allclose(found.mean(1), 1.0)
    assert (found > 0).all()
