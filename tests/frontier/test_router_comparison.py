"""The comparison on synthetic outcomes with a known answer: a perfect router, a blind one, and noisy ones."""

from __future__ import annotations

import numpy as np
import pytest

from toolwise.errors import ConfigError, DataError
from toolwise.frontier.rollout_pool import ALL_TOOLS, OutcomeTable
from toolwise.frontier.router_comparison import (
    AS_DELIVERED,
    SAMPLED,
    RouteValues,
    calibrate,
    compute_frontier,
    mean_score_at_budgets,
)

ROUTES = ("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY")
NEEDED = np.repeat([0, 1, 2, 1], 100)
"""The route that each of 400 rows needs."""


def world(draws: int = 4, *, all_tools: bool = True) -> OutcomeTable:
    """A row is right under the route it needs and wrong under any other; tools cost 1."""
    rows = len(NEEDED)
    routes = (*ROUTES, ALL_TOOLS) if all_tools else ROUTES
    scores = np.zeros((rows, len(routes), draws))
    scores[np.arange(rows), NEEDED] = 1.0
    costs = np.tile(np.array([0.0, 1.0, 1.0, 2.0])[: len(routes), None], (rows, 1, draws))
    scores[:, 3:] = 1.0
    return OutcomeTable(tuple(f"r{i}" for i in range(rows)), routes, scores, costs)


def knowing(noise: float = 0.0) -> RouteValues:
    rng = np.random.default_rng(0)
    odds = 4.0 * np.eye(3)[NEEDED] + noise * rng.standard_normal((len(NEEDED), 3))
    return RouteValues(odds - np.log(np.exp(odds).sum(axis=1, keepdims=True)))


def blind() -> RouteValues:
    return RouteValues(np.log(np.full((len(NEEDED), 3), 1 / 3)))


def test_a_router_that_knows_closes_the_gap_and_one_that_does_not_closes_none_of_it() -> None:
    budgets = [0.2, 0.4, 0.6]
    found = compute_frontier(world(), {"router": knowing(), "blind": blind()}, budgets, routes=ROUTES, replicates=200)
    for budget, gap, none in zip(budgets, found.gap_closed["router"], found.gap_closed["blind"], strict=True):
        assert gap.value > 0.99, budget
        assert abs(none.value) < 0.25, budget
        assert gap.low > 0.99
        assert none.low < none.value < none.high


def test_budgets_hold_on_rows_that_thresholds_were_not_found_on() -> None:
    found = compute_frontier(world(), {"router": knowing(noise=1.0)}, [0.1, 0.3, 0.5], routes=ROUTES, replicates=100)
    for point in found.curves["router"]:
        assert point.budget is not None
        assert abs(point.cost.value - point.budget) < 0.06
        assert point.cost.low <= point.cost.value <= point.cost.high


def test_fixed_columns_become_points() -> None:
    found = compute_frontier(world(), {"router": knowing()}, [0.5], routes=ROUTES, replicates=100)
    assert np.isclose(found.fixed["always ANSWER"].score.value, 0.25)
    assert np.isclose(found.fixed["always SEARCH-FAMILY"].score.value, 0.5)
    assert np.isclose(found.fixed[ALL_TOOLS].cost.value, 2.0)
    trained = found.fixed["router, sampled, not calibrated"]
    right = np.exp(4) / (np.exp(4) + 2)
    assert np.isclose(trained.score.value, right)
    assert np.isclose(found.curves["oracle"][0].score.value, 0.75)  # a quarter is free, another half costs 1 each


def test_what_a_router_delivers_by_default_is_a_point_beside_its_head_alone() -> None:
    always_right = np.eye(3)[np.argmax(knowing().values, axis=1)]
    found = compute_frontier(
        world(), {"router": knowing()}, [0.5], routes=ROUTES, replicates=10, delivered=always_right
    )
    delivered, sampled = (found.fixed[f"router{name}"] for name in (AS_DELIVERED, SAMPLED))
    assert (delivered.score.value, delivered.cost.value) == pytest.approx((1.0, 0.75))
    assert sampled.score.value < 1.0


def test_a_router_as_trained_is_evaluated_at_its_own_cost() -> None:
    found = compute_frontier(
        world(), {"router": knowing(), "classifier": knowing(noise=3.0)}, [0.5], routes=ROUTES, replicates=200
    )
    told, own = found.as_trained, found.fixed["router, sampled, not calibrated"]
    assert 0.9 < told["gap_closed"].value <= 1.0
    assert np.isclose(
        told["gap_closed"].value,
        (own.score.value - told["random"].value) / (told["oracle"].value - told["random"].value),
    )
    assert np.isclose(told["ahead of classifier"].value, own.score.value - told["classifier"].value)
    assert told["ahead of classifier"].low > 0
    assert abs(told["classifier, cost"].value - own.cost.value) < 0.06
    silent = RouteValues(knowing().values, samples=False)
    assert compute_frontier(world(), {"router": silent}, [0.5], routes=ROUTES, replicates=10).as_trained == {}


def test_a_worse_classifier_is_behind_by_a_paired_interval() -> None:
    routers = {"router": knowing(), "classifier": knowing(noise=3.0), "oracle labels": knowing()}
    found = compute_frontier(world(), routers, [0.4], routes=ROUTES, replicates=300)
    [ahead] = found.ahead["classifier"]
    assert 0 < ahead.low <= ahead.value <= ahead.high
    router, other, same = (found.curves[name][0].score.value for name in routers)
    assert np.isclose(ahead.value, router - other)
    assert found.ahead["oracle labels"][0].value == router - same == 0.0


def test_shares_of_routes_are_reported() -> None:
    found = compute_frontier(world(), {"router": knowing()}, [0.0, 0.75], routes=ROUTES, replicates=10)
    assert found.shares[0]["ANSWER"] == 1.0
    assert np.allclose(list(found.shares[1].values()), [0.25, 0.5, 0.25], atol=0.05)


def test_rows_that_could_not_be_scored_are_left_out_and_counted() -> None:
    outcomes = world()
    outcomes.scores[3, 1] = np.nan
    outcomes.scores[4, 1, 0] = np.nan  # one draw of four: the row stays
    found = compute_frontier(outcomes, {"router": knowing()}, [0.5], routes=ROUTES, replicates=10)
    assert (found.rows, found.left_out) == (399, 1)
    outcomes.scores[:] = np.nan
    with pytest.raises(DataError, match="no row"):
        compute_frontier(outcomes, {"router": knowing()}, [0.5], routes=ROUTES)


def test_predicted_costs_decide_where_a_router_predicts_them() -> None:
    dear = np.tile([0.0, 1.0, 5.0], (len(NEEDED), 1))
    # Searching is better, although calculating has a slightly higher predicted value.
    word = RouteValues(np.tile([0.0, 1.0, 1.1], (len(NEEDED), 1)), costs=dear, samples=False)
    found = compute_frontier(world(), {"router": word}, [0.9], routes=ROUTES, replicates=10)
    # 0.1 for 4 more comes after 1 for 1: not before every row searches. Nine of ten do.
    assert np.isclose(found.curves["router"][0].score.value, 0.9 * 0.5 + 0.1 * 0.25)
    assert "router, sampled, not calibrated" not in found.fixed


def test_thresholds_to_store_spend_their_budgets_on_these_rows() -> None:
    outcomes, word = world(all_tools=False), knowing(noise=1.0)
    spent = outcomes.mean_over_draws("costs")
    thresholds, means = calibrate(word, spent, outcomes.mean_over_draws("scores"), [0.2, 0.7])
    assert means.tolist() == [0.0, 1.0, 1.0]
    for threshold, budget in zip(thresholds, [0.2, 0.7], strict=True):
        mix = threshold.probabilities(word.values, np.broadcast_to(means, spent.shape))
        assert np.isclose((mix * spent).sum(axis=1).mean(), budget)


@pytest.mark.parametrize("budgets", [[], [-0.1], [float("nan")]])
def test_bad_budgets_are_refused(budgets: list[float]) -> None:
    with pytest.raises(ConfigError, match="budgets"):
        compute_frontier(world(), {"router": knowing()}, budgets, routes=ROUTES)


def test_non_finite_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="router"):
        compute_frontier(world(), {"router": RouteValues(np.full((400, 3), np.nan))}, [0.5], routes=ROUTES)


def test_a_router_may_choose_from_other_columns() -> None:
    """It knows which rows need tools, and gives them all: right for 2 where the router pays 1."""
    values = np.where(NEEDED[:, None] == 0, [-0.1, 0.0], [-5.0, 0.0])
    other = RouteValues(values, samples=False, columns=("ANSWER", ALL_TOOLS))
    routers = {"router": knowing(), "other": other}
    found = compute_frontier(world(), routers, [0.75, 1.5], routes=ROUTES, replicates=50)
    half, whole = found.curves["other"]
    assert (half.cost.value, half.score.value) == pytest.approx((0.75, 0.25 + 0.375), abs=0.02)
    assert (whole.cost.value, whole.score.value) == pytest.approx((1.5, 1.0), abs=0.02)
    assert "other, sampled, not calibrated" not in found.fixed


def test_the_mean_score_at_budgets_prefers_the_router_that_knows() -> None:
    budgets = [0.2, 0.4, 0.6]
    scores = [mean_score_at_budgets(world(), each, budgets, routes=ROUTES) for each in (knowing(), blind())]
    curve = compute_frontier(world(), {"router": knowing()}, budgets, routes=ROUTES, replicates=1).curves["router"]
    assert scores[0] == pytest.approx(np.mean([point.score.value for point in curve]))
    assert scores[0] > scores[1] + 0.1


def test_other_actors_are_compared_at_their_own_cost() -> None:
    outcomes = world()
    always_searching = OutcomeTable(
        outcomes.row_ids, ("OTC",), outcomes.scores[:, 1:2].copy(), np.full_like(outcomes.costs[:, 1:2], 0.5)
    )
    found = compute_frontier(
        outcomes.concat_routes(always_searching), {"router": knowing()}, [0.5], routes=ROUTES, replicates=50
    )
    assert set(found.against_fixed) == {ALL_TOOLS, "OTC"}
    against = found.against_fixed["OTC"]
    assert abs(against["cost"].value - 0.5) < 0.06
    assert against["score"].value == pytest.approx(found.curves["router"][0].score.value)
    assert against["ahead"].value == pytest.approx(against["score"].value - 0.5)
    assert against["ahead"].low > 0
    assert found.against_fixed[ALL_TOOLS]["ahead"].value == pytest.approx(0, abs=0.02)  # it cannot spend 2, need not
