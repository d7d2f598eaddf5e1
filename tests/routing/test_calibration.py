"""The calibration of trained budgets: on budget, honest about its error, spending only what helps, the same lots."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from toolwise.errors import CheckpointError
from toolwise.messages import Message
from toolwise.routing.calibration import (
    KEY,
    BudgetCalibration,
    CalibrationTable,
    calibrate_budgets,
    prompt_uniform,
    read_budget_calibration,
)
from toolwise.routing.delivered_budget import format_cost
from toolwise.routing.samples import RoutePrediction

LIMITS = {"cost": 0.5}


def world(rows: int, rolled_out: int, seed: int = 0, *, sharp: float = 3.0) -> tuple[CalibrationTable, np.ndarray]:
    """A third of the prompts each is answered, searched or calculated best. A tool is only called where it helps, so a
    route costs more on the prompts it is chosen for. Also returns the costs of all rows, [rows, routes, 1]."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, rows)
    logits = rng.normal(0, 1, (rows, 3)) + sharp * np.eye(3)[kind]
    values = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    costs = np.zeros((rows, 3, 1))
    for route in (1, 2):
        costs[:, route, 0] = rng.random(rows) < np.where(kind == route, 0.97, 0.3)
    scores = (rng.random((rows, 3)) < 0.1 + 0.8 * np.eye(3)[kind]).astype(float)
    first = np.arange(rolled_out)
    return CalibrationTable(values, None, first, costs[first], scores[first]), costs


def policy(calibration: BudgetCalibration, values: np.ndarray) -> np.ndarray:
    costs = np.broadcast_to(np.asarray(calibration.route_costs), (*values.shape, len(calibration.units)))
    return calibration.threshold.probabilities(values, costs)


def test_with_all_rows_rolled_out_the_mean_cost_is_the_budget() -> None:
    table, costs = world(300, 300)
    calibration = calibrate_budgets(table, LIMITS, step=7)
    spent = (policy(calibration, table.values)[:, :, None] * costs).sum(axis=1).mean()
    assert spent == pytest.approx(0.5, abs=1e-9)
    assert calibration.costs == pytest.approx((0.5,), abs=1e-9)
    assert (calibration.rows, calibration.rolled_out, calibration.step) == (300, 300, 7)
    assert calibration.feasible
    assert calibration.slope > 0


def test_what_is_delivered_to_new_prompts_is_within_the_stated_error() -> None:
    fresh, costs = world(6000, 1, seed=99)
    misses, errors = [], []
    for seed in range(24):
        table, _ = world(600, 128, seed)
        calibration = calibrate_budgets(table, LIMITS)
        delivered = (policy(calibration, fresh.values)[:, :, None] * costs).sum(axis=1).mean()
        misses.append(delivered - 0.5)
        errors.append(calibration.standard_errors[0])
    assert abs(np.mean(misses)) < 3 * np.mean(errors) / np.sqrt(24)
    assert 0.7 < np.std(misses) / np.mean(errors) < 1.4


def test_rows_without_rollouts_make_the_error_smaller() -> None:
    few, more = (calibrate_budgets(world(rows, 128)[0], LIMITS).standard_errors[0] for rows in (128, 2000))
    assert more < 0.75 * few


def test_budgets_are_solved_jointly() -> None:
    table, costs = world(400, 400)
    kinds = np.concatenate([costs * np.array([0, 1, 0])[:, None], costs * np.array([0, 0, 1])[:, None]], axis=2)
    both = CalibrationTable(table.values, None, table.rolled_out, kinds, table.scores)
    calibration = calibrate_budgets(both, {"search": 0.1, "calculate": 0.2})
    assert calibration.costs == pytest.approx((0.1, 0.2), abs=1e-9)
    assert len(calibration.standard_errors) == 2


def test_predicted_costs_of_a_value_head_are_used() -> None:
    table, costs = world(400, 400)
    predicted = CalibrationTable(table.values, costs, table.rolled_out, table.spent, table.scores)
    calibration = calibrate_budgets(predicted, LIMITS)
    spent = (calibration.threshold.probabilities(table.values, costs)[:, :, None] * costs).sum(axis=1).mean()
    assert spent == pytest.approx(0.5, abs=1e-9)
    prediction = RoutePrediction((0.0,) * 3, rewards=tuple(table.values[0]), costs=tuple(map(tuple, costs[0])))
    assert calibration.route(prediction, [Message(role="user", content="?")]) in (0, 1, 2)


@pytest.mark.parametrize(("helps", "spent"), [(True, 0.5), (False, 0.0)])
def test_a_budget_that_is_left_over_is_spent_only_if_that_helps(helps: bool, spent: float) -> None:
    rng = np.random.default_rng(0)
    values = np.log(rng.dirichlet([1, 1, 1], 200)) + np.array([9.0, 0, 0])  # always answers
    costs = np.tile([[0.0], [1.0], [1.0]], (200, 1, 1))
    scores = np.tile([0.2, 0.9, 0.9] if helps else [0.9, 0.2, 0.2], (200, 1))
    calibration = calibrate_budgets(CalibrationTable(values, None, np.arange(200), costs, scores), LIMITS)
    assert calibration.costs[0] == pytest.approx(spent, abs=1e-9)


def test_a_budget_that_nothing_meets_is_reported_with_the_least_cost() -> None:
    table, _ = world(100, 100)
    dear = CalibrationTable(table.values, None, table.rolled_out, table.spent + 0.75, table.scores)
    calibration = calibrate_budgets(dear, LIMITS)
    assert not calibration.feasible
    assert calibration.least == pytest.approx((0.75,))
    assert calibration.costs == pytest.approx((0.75,))


def test_it_survives_json_and_other_budgets_are_not_mixed_up() -> None:
    calibration = calibrate_budgets(world(100, 64)[0], LIMITS)
    stored = json.loads(json.dumps({KEY: calibration.to_json()}))
    assert read_budget_calibration(stored, LIMITS) == calibration
    assert read_budget_calibration(stored, {"cost": 0.4}) is None
    assert read_budget_calibration({}, LIMITS) is None
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_budget_calibration({KEY: {"units": 3}}, LIMITS)


def test_the_lot_of_a_prompt_is_the_same_in_every_process_and_version() -> None:
    prompt = [Message(role="system", content="Be brief."), Message(role="user", content="Wie viele Brücken?")]
    assert prompt_uniform(prompt) == 0.3511604573275632
    assert prompt_uniform(prompt[1:]) != prompt_uniform(prompt)


def test_lots_of_different_prompts_are_uniform() -> None:
    lots = np.array([prompt_uniform([Message(role="user", content=f"What is {i} + 1?")]) for i in range(4000)])
    counts, _ = np.histogram(lots, bins=10, range=(0, 1))
    assert (np.abs(counts - 400) < 4 * 20).all()
    other = [prompt_uniform([Message(role="user", content=f"What is {i} + 1?")], "salt") for i in range(4000)]
    assert abs(np.corrcoef(lots, other)[0, 1]) < 0.06


def test_routes_that_do_not_apply_are_never_chosen_and_cost_nothing() -> None:
    """A third of the prompts cannot search, another third cannot be answered directly."""
    table, costs = world(600, 600)
    applies = np.ones((600, 3), dtype=bool)
    applies[::3, 1] = applies[1::3, 0] = False
    spent = np.where(applies[:, :, None], costs, 0.0)
    values = np.where(applies, table.values, -np.inf)
    masked = CalibrationTable(values, None, table.rolled_out, spent, table.scores)
    for limits in ({"cost": 0.5}, {"cost": 0.35}):
        calibration = calibrate_budgets(masked, limits)
        chosen = policy(calibration, values)
        assert (chosen[~applies] == 0).all()
        assert (chosen[:, :, None] * spent).sum(axis=1).mean() == pytest.approx(limits["cost"], abs=1e-9)
    assert calibration.route_costs[1][0] == pytest.approx(spent[applies[:, 1], 1].mean())


def test_several_budgets_hold_with_routes_that_do_not_apply() -> None:
    table, costs = world(600, 600)
    applies = np.ones((600, 3), dtype=bool)
    applies[::3, 1] = applies[1::3, 2] = False
    both = np.zeros((600, 3, 2))
    both[:, 1, 0], both[:, 2, 1] = costs[:, 1, 0], costs[:, 2, 0]
    both = np.where(applies[:, :, None], both, 0.0)
    values = np.where(applies, table.values, -np.inf)
    calibration = calibrate_budgets(
        CalibrationTable(values, None, table.rolled_out, both, table.scores), {"search": 0.1, "calculate": 0.15}
    )
    assert calibration.costs == pytest.approx((0.1, 0.15), abs=1e-9)
    assert (policy(calibration, values)[~applies] == 0).all()


def test_rounding_of_a_large_budget_is_no_excess() -> None:
    table, _ = world(300, 300)
    unit = 1e9
    scaled = CalibrationTable(table.values, None, table.rolled_out, table.spent * unit / 3, table.scores)
    for share in (0.2, 0.3, 0.4, 0.5):
        assert calibrate_budgets(scaled, {"cost": share * unit / 3}).feasible


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"limits": [0.5, 0.6]}, "its limits and costs are not one per unit"),
        ({"units": ["cost", "cost"]}, "its units are missing or repeat"),
        ({"costs": [math.nan]}, "its limits, costs and scores are not all finite"),
        ({"route_costs": [[0.0], [1.0, 2.0], [1.0]]}, "its charges and route costs are not one per unit"),
        ({"threshold": {"charges": [], "bonuses": [], "shares": []}}, "its shares do not add up to 1"),
        ({"threshold": {"charges": [[0.0]], "bonuses": [], "shares": [1.0]}}, "are not one per policy"),
        ({"threshold": {"charges": [[math.nan]], "bonuses": [[0.0]], "shares": [1.0]}}, "are not all finite"),
        ({"threshold": {"charges": [[0.0, 1.0]], "bonuses": [[0.0, 1.0]], "shares": [1.0]}}, "are not one per unit"),
        ({"threshold": {"charges": [[0.0]], "bonuses": [[0.0]], "shares": [-1.0]}}, "its shares do not add up to 1"),
    ],
)
def test_numbers_that_do_not_belong_together_are_refused(damage: dict[str, Any], reason: str) -> None:
    stored = calibrate_budgets(world(64, 64)[0], LIMITS).to_json() | damage
    with pytest.raises(CheckpointError, match=f"cannot be read .*{reason}"):
        read_budget_calibration({KEY: stored}, LIMITS)


def test_one_task_without_a_lottery_has_no_error() -> None:
    cost = 0.1 + 0.2  # its square is rounded
    table = CalibrationTable(np.log([[0.5, 0.5]]), None, np.array([0]), np.full((1, 2, 1), cost), np.zeros((1, 2)))
    for share in (0.1, 0.3, 0.7):
        mixture = np.array([[share, 1.0 - share]])
        assert table.standard_errors(mixture).tolist() == [pytest.approx(0.0, abs=1e-9)]


@pytest.mark.parametrize(
    ("value", "scale", "shown"),
    [
        (0.487, 0.5, "0.487"),
        (12.0, None, "12.000"),
        (0.0, None, "0.000"),
        (0.000412, 0.0004, "0.000412"),
        (0.000007, 0.0004, "0.000007"),
        (0.000412, None, "0.000412"),
        (0.0, 0.008, "0.00000"),
        (0.3, 0.0, "0.300"),
    ],
)
def test_small_costs_keep_three_digits(value: float, scale: float | None, shown: str) -> None:
    assert format_cost(value, scale) == shown
