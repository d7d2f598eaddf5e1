"""Thresholds on route values: by hand, against brute force, and exactly on the budget for any rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from toolwise.routing.threshold import choose_routes, find_threshold, hull_moves

VALUES = np.array([[0.0, 2.0, -1.0], [0.0, 1.0, 0.5], [0.0, -1.0, -3.0]])
COSTS = np.tile([0.0, 1.0, 1.0], (3, 1))


def test_moves_are_the_corners_of_the_hulls_steepest_first() -> None:
    moves = hull_moves(VALUES, COSTS)
    assert moves.first.tolist() == [0, 0, 0]
    assert moves.row.tolist() == [0, 1, 2]
    assert moves.after.tolist() == [1, 1, 1]
    assert moves.slope.tolist() == [2.0, 1.0, -1.0]


def test_a_point_on_the_line_between_two_others_is_no_corner() -> None:
    moves = hull_moves(np.array([[0.0, 1.0, 2.0]]), np.array([[0.0, 1.0, 2.0]]))
    assert moves.after.tolist() == [2]
    assert moves.slope.tolist() == [1.0]


def test_of_equally_cheap_routes_the_best_comes_first() -> None:
    assert hull_moves(np.array([[0.0, 5.0, 9.0]]), np.array([[0.0, 0.0, 1.0]])).first.tolist() == [1]


def test_a_budget_of_one_third_lets_the_surest_row_search() -> None:
    threshold = find_threshold(VALUES, COSTS, COSTS, 1 / 3)
    assert 1.0 < threshold.offset < 2.0
    assert choose_routes(VALUES, COSTS, threshold.offset).tolist() == [1, 0, 0]
    assert threshold.share < 1e-9


def test_between_two_steps_a_share_of_the_prompts_is_decided_by_the_looser_offset() -> None:
    threshold = find_threshold(VALUES, COSTS, COSTS, 0.5)
    assert np.isclose(threshold.share, 0.5)
    spent = (threshold.probabilities(VALUES, COSTS) * COSTS).sum(axis=1).mean()
    assert np.isclose(spent, 0.5)
    assert [threshold.route(VALUES[1], COSTS[1], chance) for chance in (0.2, 0.8)] == [1, 0]


def test_equal_prompts_are_split_at_random() -> None:
    values, costs = np.tile([0.0, 1.0], (10, 1)), np.tile([0.0, 1.0], (10, 1))
    threshold = find_threshold(values, costs, costs, 0.3)
    assert np.isclose(threshold.share, 0.3)
    assert np.isclose((threshold.probabilities(values, costs) * costs).sum(axis=1).mean(), 0.3)


def test_budgets_out_of_reach_give_the_cheapest_and_the_costliest_routes() -> None:
    dear = COSTS + 0.5
    for budget, route in ((0.1, 0), (99.0, 1)):
        threshold = find_threshold(VALUES, dear, dear, budget)
        assert choose_routes(VALUES, dear, threshold.offset).tolist() == [route] * 3
        assert threshold.share == 0.0


def test_of_equal_worth_the_cheapest_route_is_taken() -> None:
    assert choose_routes(np.array([[1.0, 2.0]]), np.array([[0.0, 1.0]]), 1.0).tolist() == [0]


TENTHS = st.integers(-30, 30).map(lambda tenths: tenths / 10)


@given(
    st.integers(1, 8).flatmap(
        lambda rows: st.tuples(
            arrays(float, (rows, 3), elements=TENTHS),
            arrays(float, (rows, 3), elements=st.integers(0, 4).map(lambda x: x / 4)),
        )
    ),
    st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_the_mean_cost_is_the_budget_wherever_it_can_be(tables: tuple[np.ndarray, np.ndarray], budget: float) -> None:
    values, costs = tables
    threshold = find_threshold(values, costs, costs, budget)
    spent = (threshold.probabilities(values, costs) * costs).sum(axis=1).mean()
    free = costs <= costs.min(axis=1, keepdims=True)
    rows = np.arange(len(values))
    best = np.where(values == values.max(axis=1, keepdims=True), -costs, -9).argmax(axis=1)
    tool = np.where(free, -9, values - 1e-6 * costs).argmax(axis=1)
    most = np.where(free[rows, best] & ~free.all(axis=1), costs[rows, tool], costs[rows, best]).mean()
    assert np.isclose(spent, np.clip(budget, costs.min(axis=1).mean(), max(most, costs.min(axis=1).mean())), atol=1e-9)


@given(
    st.integers(1, 6).flatmap(lambda rows: arrays(float, (rows, 3), elements=st.floats(-3, 3, width=16))),
    st.floats(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_walking_the_moves_gives_what_choosing_gives(values: np.ndarray, offset: float) -> None:
    costs = np.tile([0.0, 1.0, 2.5], (len(values), 1))
    moves = hull_moves(values, costs)
    if np.abs(moves.slope - offset).min(initial=9.0) < 1e-6:
        return  # a tie, which either may break
    routes = moves.first.copy()
    for row, after, slope in zip(moves.row, moves.after, moves.slope, strict=True):
        if slope > offset:
            routes[row] = after
    assert routes.tolist() == choose_routes(values, costs, offset).tolist()


def test_looser_than_trained_uses_the_tool_that_the_router_prefers() -> None:
    values, costs = np.array([[0.0, -1.0, -2.0], [0.0, -2.0, -0.5]]), np.tile([0.0, 1.0, 3.0], (2, 1))
    assert choose_routes(values, costs, -0.4).tolist() == [0, 0]
    assert choose_routes(values, costs, -0.6).tolist() == [0, 2]
    assert choose_routes(values, costs, -9.0).tolist() == [1, 2]
    threshold = find_threshold(values, costs, costs, 99.0)
    assert choose_routes(values, costs, threshold.offset).tolist() == [1, 2]


def test_with_scores_a_budget_is_an_upper_limit() -> None:
    scores = np.array([[0.0, 1.0, 0.0], [0.9, 0.1, 0.0], [1.0, 0.0, 0.0]])  # only the first row gains by searching
    for budget in (1 / 3, 0.5, 1.0):
        threshold = find_threshold(VALUES, COSTS, COSTS, budget, scores)
        assert choose_routes(VALUES, COSTS, threshold.offset).tolist() == [1, 0, 0], budget
        assert threshold.share < 1e-9


@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1e6, 1e9, 1e12])
def test_the_unit_of_cost_does_not_matter(unit: float) -> None:
    rng = np.random.default_rng(0)
    values = np.log(rng.dirichlet(np.ones(3), size=200))
    costs = np.tile([0.0, 1.0, 2.0], (200, 1))
    spent = costs * rng.uniform(0.5, 1.5, costs.shape)
    for budget in (0.1, 0.5, 1.2):
        usual = find_threshold(values, costs, spent, budget).probabilities(values, costs)
        other = find_threshold(values, costs * unit, spent * unit, budget * unit).probabilities(values, costs * unit)
        assert np.allclose(other, usual, atol=1e-6)
