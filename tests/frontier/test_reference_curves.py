"""The oracle, random and fixed-mixture curves: a table worked by hand, and properties of all outcomes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from toolwise.frontier.reference_curves import (
    describe_unmet,
    estimate,
    fixed_mixture_curve,
    oracle_curve,
    random_curve,
    row_weights,
)

# Routes: answer, search, calculate. Four rows; the means of their draws.
SCORES = np.array([[0.9, 1.0, 0.9], [0.0, 0.8, 0.1], [0.1, 0.0, 0.9], [0.0, 0.0, 0.0]])
COSTS = np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 2.0], [0.0, 1.0, 1.0]])
ALONE = np.full((1, 4), 0.25)


def score_at(curve: object, cost: float) -> float:
    return float(curve.score_at(np.array([cost]))[0])  # type: ignore[attr-defined]


def test_the_oracle_spends_as_it_was_worked_out_by_hand() -> None:
    # Steps by slope: row 1 search 0.8/1, row 2 calculate 0.8/2, row 0 search 0.1/1; row 3 has nothing to gain.
    curve = oracle_curve(SCORES, COSTS, ALONE)
    assert np.allclose(curve.costs, [[0, 0.25, 0.75, 1.0]])
    assert np.allclose(curve.scores, [[0.25, 0.45, 0.65, 0.675]])
    assert np.isclose(score_at(curve, 0.5), 0.55)
    assert np.isclose(score_at(curve, 9.0), 0.675)


def test_random_is_a_line_from_answering_to_tools() -> None:
    curve = random_curve(SCORES, COSTS, ALONE, free=0)
    answer, tools = 0.25, (0.45 + 0.475) / 2
    assert np.allclose(curve.costs, [[0, (1.0 + 1.25) / 2]])
    assert np.allclose(curve.scores, [[answer, tools]])
    assert np.isclose(score_at(curve, 1.125 / 2), (answer + tools) / 2)


def test_the_fixed_mixture_is_the_upper_hull() -> None:
    # search (1.0, 0.45) has slope 0.2 from answer; calculate (1.25, 0.475) 0.18: both are corners.
    curve = fixed_mixture_curve(SCORES, COSTS, ALONE)
    assert np.allclose(curve.costs, [[0, 1.0, 1.25]])
    assert np.allclose(curve.scores, [[0.25, 0.45, 0.475]])
    worse = SCORES.copy()
    worse[:, 1] = 0.0
    assert np.allclose(fixed_mixture_curve(worse, COSTS, ALONE).costs, [[0, 1.25]])


def test_a_replicate_is_the_curve_of_its_resampled_rows() -> None:
    weights = np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.0, 0.5, 0.0]])
    curve = oracle_curve(SCORES, COSTS, weights)
    drawn = oracle_curve(SCORES[[0, 2]], COSTS[[0, 2]], np.full((1, 2), 0.5))
    for cost in (0.0, 0.3, 1.0, 1.4):
        assert np.isclose(curve.score_at(np.array([0.0, cost]))[1], score_at(drawn, cost))


def test_luck_does_not_count_on_other_draws() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.binomial(8, 0.5, (400, 3)) / 8 for _ in range(2))  # no route is better for any row
    costs = np.tile([0.0, 1.0, 1.0], (400, 1))
    weights = row_weights(400, 0, 0)
    lucky = oracle_curve(first, costs, weights)
    honest = oracle_curve(first, costs, weights, paid_scores=second, paid_costs=costs)
    assert score_at(lucky, 1.0) > 0.6
    assert abs(score_at(honest, 1.0) - 0.5) < 0.03


UNIT = st.floats(0, 1, width=16)
ROWS = st.integers(1, 6)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = draw(ROWS)
    scores = draw(arrays(float, (rows, 3), elements=UNIT))
    costs = draw(arrays(float, (rows, 3), elements=UNIT))
    lots = draw(arrays(float, (rows, 3), elements=UNIT)) + 1e-3
    return scores, costs, lots / lots.sum(axis=1, keepdims=True)


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_nothing_beats_the_oracle_at_equal_cost(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    scores, costs, mixture = world
    weights = np.full((1, len(scores)), 1 / len(scores))
    oracle = oracle_curve(scores, costs, weights)
    spent, earned = ((mixture * what).sum(axis=1).mean() for what in (costs, scores))
    assert score_at(oracle, spent) >= earned - 1e-9
    blind = fixed_mixture_curve(scores, costs, weights)
    lot = random_curve(scores, costs, weights, free=0)
    for share in (0.0, 0.3, 1.0):
        cost, score = ((1 - share) * line[0, 0] + share * line[0, -1] for line in (lot.costs, lot.scores))
        assert score_at(blind, cost) >= score - 1e-9
        assert score_at(oracle, cost) >= score_at(blind, cost) - 1e-9


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_the_oracle_is_monotone_and_concave(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    scores, costs, _ = world
    curve = oracle_curve(scores, costs, np.full((1, len(scores)), 1 / len(scores)))
    steps, gains = np.diff(curve.costs[0]), np.diff(curve.scores[0])
    assert (steps >= 0).all()
    assert (gains >= 0).all()
    slopes = gains[steps > 1e-9] / steps[steps > 1e-9]
    assert (np.diff(slopes) <= 1e-6).all()


def test_the_first_weights_are_the_sample_and_the_others_resamples_of_it() -> None:
    weights = row_weights(10, 50, 0)
    assert weights.shape == (51, 10)
    assert np.allclose(weights.sum(axis=1), 1)
    assert np.allclose(weights[0], 0.1)
    assert np.allclose(weights * 10, np.round(weights * 10))
    assert np.array_equal(weights, row_weights(10, 50, 0))
    assert not np.array_equal(weights, row_weights(10, 50, 1))


def test_the_interval_of_a_mean_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for trial in range(400):
        found = estimate(row_weights(100, 300, trial) @ rng.normal(3.0, 1.0, 100))
        held += found.low <= 3.0 <= found.high
    assert 0.91 <= held / 400 <= 0.975


def test_nan_is_left_out_of_the_interval() -> None:
    found = estimate(np.array([0.5, np.nan, 0.4, 0.6]))
    assert found.value == 0.5
    assert 0.4 <= found.low < 0.42
    assert 0.58 < found.high <= 0.6
    assert np.isnan(estimate(np.array([np.nan, np.nan])).low)


def test_budgets_below_the_cheapest_routes_that_apply_are_noted() -> None:
    costs = np.array([[0.0, 1.0], [0.0, 1.0]])
    either, second_only = np.ones((2, 2), dtype=bool), np.array([[True, True], [False, True]])
    assert describe_unmet([0.0, 0.4], costs, either) == []
    assert describe_unmet([0.0, 0.4, 0.5, 1.0], costs, second_only) == [
        "budgets that no routes meet here: 0, 0.4; the cheapest routes cost 0.5"
    ]
