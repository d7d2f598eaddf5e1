"""Thresholds for several budgets: hand-worked tables, and for any rows exactly on every binding budget, never over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from toolwise.routing.joint_threshold import JointThreshold, choose_joint, fit_joint_threshold, simplex

ROUTES = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
"""Costs of answering, searching and calculating, in searches and calculations."""
VALUES = np.array([[0.0, 4.0, 1.0], [0.0, 2.0, 1.0], [0.0, 1.0, 3.0], [0.0, -1.0, 2.0]])
COSTS = np.tile(ROUTES, (4, 1, 1))


def mixture_of(threshold: JointThreshold, values: np.ndarray, costs: np.ndarray) -> np.ndarray:
    mixture = threshold.probabilities(values, costs)
    assert np.allclose(mixture.sum(axis=1), 1)
    return mixture


def spent(mixture: np.ndarray, costs: np.ndarray) -> np.ndarray:
    return np.asarray((mixture[:, :, None] * costs).sum(axis=1).mean(axis=0))


def test_a_quarter_of_each_goes_to_the_row_that_gains_most() -> None:
    threshold = fit_joint_threshold(VALUES, COSTS, COSTS, [0.25, 0.25], loosen=False)
    mixture = mixture_of(threshold, VALUES, COSTS)
    # Rows 0 and 2 gain 4 and 3. Row 1 would gain 1 by calculating, which is spent on row 2.
    assert np.allclose(mixture, [[0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]])


def test_budgets_between_two_rows_are_met_by_a_lottery() -> None:
    threshold = fit_joint_threshold(VALUES, COSTS, COSTS, [0.375, 0.125], loosen=False)
    mixture = mixture_of(threshold, VALUES, COSTS)
    assert np.allclose(spent(mixture, COSTS), [0.375, 0.125], atol=1e-12)
    # 1.5 searches: 4 + half of 2; half a calculation: half of 3.
    assert (mixture * VALUES).sum() == pytest.approx(4 + 1 + 1.5)
    assert len(threshold.shares) <= 3


def test_a_budget_that_does_not_bind_changes_nothing() -> None:
    threshold = fit_joint_threshold(VALUES, COSTS, COSTS, [0.9, 0.25], loosen=False)
    mixture = mixture_of(threshold, VALUES, COSTS)
    # Unbounded, rows 0 and 1 search and rows 2 and 3 calculate. One calculation is left: row 2 gains 3 − 1 by it over
    # searching, row 3 gains 2 over answering.
    assert np.allclose(spent(mixture, COSTS)[1], 0.25, atol=1e-12)
    assert (mixture * VALUES).sum() == pytest.approx(4 + 2 + 1 + 2)


def test_a_budget_of_nothing_is_kept() -> None:
    threshold = fit_joint_threshold(VALUES, COSTS, COSTS, [0.0, 0.5], loosen=False)
    mixture = mixture_of(threshold, VALUES, COSTS)
    assert np.allclose(spent(mixture, COSTS), [0.0, 0.5], atol=1e-12)
    assert np.allclose(mixture[:, 2], [0, 0, 1, 1])


def test_where_no_budget_can_be_met_the_cheapest_routes_are_taken() -> None:
    dear = COSTS + 0.5
    for limits in ([0.1, 0.2], [0.4, 9.0]):
        mixture = mixture_of(fit_joint_threshold(VALUES, dear, dear, limits, loosen=False), VALUES, dear)
        assert spent(mixture, dear)[0] == pytest.approx(0.5)


def test_loosened_rows_move_to_tools_until_the_budgets_are_spent() -> None:
    values = np.array([[0.0, -1.0, -3.0], [0.0, -4.0, -4.0], [0.0, -9.0, -0.5], [0.0, -9.0, -6.0]])
    tight = fit_joint_threshold(values, COSTS, COSTS, [0.25, 0.5], loosen=False)
    assert np.allclose(mixture_of(tight, values, COSTS)[:, 0], 1)  # the head's best routes
    loose = fit_joint_threshold(values, COSTS, COSTS, [0.25, 0.5], loosen=True)
    mixture = mixture_of(loose, values, COSTS)
    assert np.allclose(spent(mixture, COSTS), [0.25, 0.5], atol=1e-12)
    assert mixture[0, 1] == pytest.approx(1)
    assert mixture[2, 2] == pytest.approx(1)


def test_one_budget_is_the_threshold_of_one_budget() -> None:
    costs = COSTS.sum(axis=2, keepdims=True)
    for limit in (0.0, 0.3, 0.7, 2.0):
        mixture = mixture_of(fit_joint_threshold(VALUES, costs, costs, [limit], loosen=True), VALUES, costs)
        assert spent(mixture, costs)[0] == pytest.approx(min(limit, 1.0), abs=1e-12)


def test_the_lot_of_a_prompt_picks_its_policy() -> None:
    threshold = JointThreshold(((5.0, 5.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)), (0.25, 0.75))
    routes = [threshold.route(VALUES[0], ROUTES, lambda lot=lot: lot) for lot in (0.0, 0.24, 0.26, 0.999999)]
    assert routes == [0, 0, 1, 1]


def test_no_lot_is_drawn_where_the_policies_agree() -> None:
    threshold = JointThreshold(((5.0, 5.0), (4.0, 4.0)), ((0.0, 0.0), (0.0, 0.0)), (0.25, 0.75))
    assert threshold.route(VALUES[0], ROUTES, lambda: pytest.fail("a lot was drawn")) == 0


def test_of_equals_the_cheapest_route_is_chosen() -> None:
    assert choose_joint(np.zeros((1, 3)), COSTS[:1], (0.0, 0.0), (0.0, 0.0)).tolist() == [0]
    assert choose_joint(np.zeros((1, 3)), COSTS[:1], (0.0, 0.0), (0.0, 1.0)).tolist() == [2]


def test_the_simplex_solves_a_program_worked_by_hand() -> None:
    # max 3x + 2y such that x + y ≤ 4 and x + 3y ≤ 6: x = 4, y = 0
    matrix = np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 3.0, 0.0, 1.0]])
    solution, duals = simplex(matrix, np.array([4.0, 6.0]), np.array([3.0, 2.0, 0.0, 0.0]), [2, 3])
    assert np.allclose(solution, [4, 0, 0, 2])
    assert np.allclose(duals, [3, 0])


TABLES = st.integers(1, 12).flatmap(
    lambda rows: st.tuples(
        arrays(float, (rows, 3), elements=st.integers(-30, 30).map(lambda tenths: tenths / 10)),
        arrays(float, (rows, 3, 2), elements=st.integers(0, 4).map(lambda quarters: quarters / 4)),
    )
)
LIMITS = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2)


@given(TABLES, LIMITS)
@settings(max_examples=120, deadline=None)
def test_no_budget_is_exceeded_and_every_binding_one_is_met(
    tables: tuple[np.ndarray, np.ndarray], limits: list[float]
) -> None:
    values, costs = tables
    costs[:, 0] = 0.0  # answering is free, so that any budget can be met
    mixture = mixture_of(fit_joint_threshold(values, costs, costs, limits, loosen=False), values, costs)
    means, value = spent(mixture, costs), (mixture * values).sum(axis=1).mean()
    assert (means <= np.array(limits) + 1e-9).all()
    for unit in (0, 1):
        if means[unit] < limits[unit] - 1e-9:  # does not bind: without it nothing would be gained
            free = [9.0 if other == unit else limits[other] for other in (0, 1)]
            without = mixture_of(fit_joint_threshold(values, costs, costs, free, loosen=False), values, costs)
            assert (without * values).sum(axis=1).mean() == pytest.approx(value, abs=1e-7)


@given(TABLES, LIMITS)
@settings(max_examples=60, deadline=None)
def test_a_larger_budget_is_never_worth_less(tables: tuple[np.ndarray, np.ndarray], limits: list[float]) -> None:
    values, costs = tables
    costs[:, 0] = 0.0
    worth = []
    for factor in (0.5, 1.0, 1.5):
        scaled = [factor * limit for limit in limits]
        mixture = mixture_of(fit_joint_threshold(values, costs, costs, scaled, loosen=False), values, costs)
        worth.append(float((mixture * values).sum(axis=1).mean()))
    assert worth[0] <= worth[1] + 1e-9
    assert worth[1] <= worth[2] + 1e-9


@given(TABLES, LIMITS, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_actual_costs_that_differ_from_the_expected_are_within_the_budgets_too(
    tables: tuple[np.ndarray, np.ndarray], limits: list[float], seed: int
) -> None:
    values, costs = tables
    costs[:, 0] = 0.0
    actual = costs * np.random.default_rng(seed).uniform(0.5, 2.0, costs.shape)
    for loosen in (False, True):
        mixture = mixture_of(fit_joint_threshold(values, costs, actual, limits, loosen=loosen), values, costs)
        assert (spent(mixture, actual) <= np.array(limits) + 1e-9).all()


@given(
    arrays(np.float64, 4, elements=st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 1.0])),
    arrays(np.float64, (4, 1), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5]),
)
def test_one_prompt_is_routed_like_a_row_of_many(
    values: np.ndarray, costs: np.ndarray, charge: float, bonus: float
) -> None:
    values[0] = max(values[0], -1.0)  # some route applies
    threshold = JointThreshold(((charge,),), ((bonus,),), (1.0,))
    expected = choose_joint(values[None], costs[None], (charge,), (bonus,))[0]
    assert threshold.route(values, costs, lambda: 0.0) == expected
