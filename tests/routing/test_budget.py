"""λ against hand-worked tables, its cap, and its state."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.config.loader import build_config
from toolwise.config.router import BudgetConfig
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.routing.budget import Budgets, Multiplier


def budget(limit: float, **options: Any) -> BudgetConfig:
    """Without a proportional term unless given."""
    return BudgetConfig(limit=limit, **({"rate": 0.05, "proportional": 0.0} | options))


def drive(multiplier: Multiplier, *costs: list[float]) -> list[float]:
    """λ after each training step."""
    path = []
    for step in costs:
        multiplier.observe(step)
        multiplier.step()
        path.append(multiplier.value)
    return path


def test_plain_ascent_by_hand() -> None:
    # B 0.3, η 0.5:        mean 0.8        0.5        0.0         0.0        0.4
    #                   0 + .25 = .25  + .1 = .35  − .15 = .2  − .15 = .05  + .05 = .1
    multiplier = Multiplier(budget(0.3, rate=0.5))
    path = drive(multiplier, [1, 1, 1, 1, 0], [1, 0], [0, 0], [0], [1, 1, 0, 0, 0])
    assert path == pytest.approx([0.25, 0.35, 0.2, 0.05, 0.1], abs=1e-15)


def test_lambda_never_falls_below_zero_and_rises_from_there() -> None:
    multiplier = Multiplier(budget(0.5, rate=1.0, initial=0.2))
    assert drive(multiplier, [0], [0], [1]) == [0.0, 0.0, 0.5]


def test_every_k_steps_over_all_rollouts_since_the_last_dual_step() -> None:
    # Steps 1 and 2: four of six rollouts cost 1, mean 4/6 (not 5/8, the mean of the two steps' means).
    # Steps 3 and 4: one rollout that cost nothing, mean 0.
    multiplier = Multiplier(budget(0.25, rate=0.5, initial=0.1, every=2))
    path = drive(multiplier, [1, 1, 1, 0], [1, 0], [0], [])
    first = 0.1 + 0.5 * (4 / 6 - 0.25)
    assert path == pytest.approx([0.1, first, first, first - 0.125])


def test_a_dual_step_without_a_rollout_waits_for_one() -> None:
    multiplier = Multiplier(budget(0.5, rate=1.0, initial=1.0))
    assert not multiplier.step()
    assert multiplier.value == 1.0
    multiplier.observe([0.0])
    assert multiplier.step()
    assert multiplier.value == 0.5


def test_proportional_and_derivative_terms_by_hand() -> None:
    # B 0.2, η 0.5, kp 2, kd 1.   mean   e     I                λ = I + 2e + Δe
    #                             0.6   0.4   0.2              0.2 + 0.8 + 0   = 1.0
    #                             0.4   0.2   0.3              0.3 + 0.4 − 0.2 = 0.5
    #                             0.1  −0.1   0.25             0.25 − 0.2 − 0.3 → 0
    #                             0.2   0     0.25             0.25 + 0 + 0.1  = 0.35
    multiplier = Multiplier(budget(0.2, rate=0.5, proportional=2.0, derivative=1.0))
    assert drive(multiplier, [0.6], [0.4], [0.1], [0.2]) == pytest.approx([1.0, 0.5, 0.0, 0.35])
    assert multiplier.integral == pytest.approx(0.25)


def test_it_starts_at_the_solved_lambda_and_moves_with_it() -> None:
    # B 0.4, η 0.5, kp 1; the window's mean is 0.6, 0.4, 0.5, whatever the prompts of the step cost.
    #   solved 1.0        1.2         none
    #   I      1 + .1     + .2        + .05
    #   λ      1.1 + .2   1.3         1.35 + .1
    multiplier = Multiplier(budget(0.4, rate=0.5, proportional=1.0))
    path = []
    for mean, solved in ((0.6, 1.0), (0.4, 1.2), (0.5, None)):
        multiplier.observe([9.0])
        multiplier.step(mean, solved)
        path.append(multiplier.value)
    assert path == pytest.approx([1.3, 1.3, 1.45])
    assert multiplier.metrics()["router/cost/mean"] == 9.0


def test_a_solved_lambda_stays_within_the_cap() -> None:
    multiplier = Multiplier(budget(0.4, cap=0.5))
    multiplier.observe([0.4])
    multiplier.step(0.4, 2.0)
    assert multiplier.value == multiplier.integral == 0.5


def test_the_integral_does_not_wind_up_at_the_cap() -> None:
    # cap 1, η 0.4, kp 1, e 0.5 throughout: I .2 λ .7 | I .4 λ .9 | I .6 λ 1 | held: I stays .6
    multiplier = Multiplier(budget(0.5, rate=0.4, proportional=1.0, cap=1.0))
    assert drive(multiplier, *[[1.0]] * 3) == pytest.approx([0.7, 0.9, 1.0])
    drive(multiplier, *[[1.0]] * 50)
    assert (multiplier.value, multiplier.integral) == (1.0, pytest.approx(0.6))
    # One cheap step brings λ off its cap at once.
    assert drive(multiplier, [0.4])[0] == pytest.approx(0.6 - 0.04 - 0.1)


def test_nor_does_it_wind_up_below_zero() -> None:
    multiplier = Multiplier(budget(0.5, rate=0.4, proportional=1.0))
    drive(multiplier, *[[0.0]] * 50)
    assert multiplier.integral == 0.0
    assert drive(multiplier, [1.0])[0] == pytest.approx(0.2 + 0.5)


def test_a_binding_cap_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    multiplier = Multiplier(budget(0.2, unit="usd", rate=1.0, cap=0.5))
    with caplog.at_level(logging.WARNING, logger="toolwise"):
        drive(multiplier, [0.4])
        assert caplog.messages == []
        assert multiplier.metrics()["router/usd/lambda_at_cap"] == 0.0
        drive(multiplier, [1.0], [1.0])
    (said,) = caplog.messages
    assert (
        said
        == "budget 'usd': λ is at its cap 0.5 and the mean cost is 0.8 above the limit 0.2: raise the cap or the limit"
    )
    assert multiplier.metrics()["router/usd/lambda_at_cap"] == 1.0
    with caplog.at_level(logging.WARNING, logger="toolwise"):
        drive(multiplier, [0.0], [1.0])
    assert len(caplog.messages) == 2


def test_metrics() -> None:
    multiplier = Multiplier(budget(0.3, rate=1.0, every=2))
    assert multiplier.metrics() == {
        "router/cost/lambda": 0.0,
        "router/cost/budget": 0.3,
        "router/cost/lambda_at_cap": 0.0,
    }
    multiplier.observe([1.0])
    multiplier.observe([0.0, 0.0, 1.0])
    multiplier.step()
    figures = multiplier.metrics("thinking")
    assert figures["thinking/cost/mean"] == 0.5
    assert figures["thinking/cost/gap"] == pytest.approx(0.2)
    multiplier.observe([0.0])
    assert multiplier.metrics()["router/cost/mean"] == 0.0


def test_several_budgets_each_with_its_lambda() -> None:
    budgets = Budgets([budget(0.1, rate=1.0), budget(2.0, unit="seconds", rate=0.1, initial=1.0)])
    budgets.observe({"cost": [0.5, 0.5], "seconds": [1.0, 2.0], "usd": [9.0]})
    budgets.step()
    assert budgets.lambdas == pytest.approx({"cost": 0.4, "seconds": 0.95})
    assert set(budgets.metrics()) >= {"router/cost/lambda", "router/seconds/gap"}


def test_it_resumes_from_its_state() -> None:
    made = [budget(0.3, rate=0.5, proportional=1.0, derivative=0.5, every=3, cap=2.0), budget(1.0, unit="s")]
    steps = [{"cost": [0.1 * i, 1.0], "s": [float(i)]} for i in range(12)]

    def take(budgets: Budgets, some: list[dict[str, list[float]]]) -> None:
        for costs in some:
            budgets.observe(costs)
            budgets.step()

    whole, before, after = Budgets(made), Budgets(made), Budgets(made)
    take(whole, steps)
    take(before, steps[:7])
    after.load_state_dict(before.state_dict())
    take(after, steps[7:])
    assert after.state_dict() == whole.state_dict()
    assert after.lambdas == whole.lambdas


def test_a_new_budget_starts_at_its_initial_lambda() -> None:
    old = Budgets([budget(0.3, initial=0.7)])
    new = Budgets([budget(0.3), budget(1.0, unit="usd", initial=0.2)])
    new.load_state_dict(old.state_dict())
    assert new.lambdas == {"cost": 0.7, "usd": 0.2}


@pytest.mark.parametrize("settings", [{"proportional": 2.0}, {"proportional": 2.0, "derivative": 0.5}])
@pytest.mark.parametrize("limit", [0.2, 0.4, 0.6])
def test_a_proportional_term_holds_the_budget_in_a_short_run(limit: float, settings: dict[str, float]) -> None:
    """Simulated spending that responds to λ gradually and one step late: the last quarter of 80 steps."""
    multiplier = Multiplier(budget(limit, rate=0.2, cap=10.0, **settings))
    logit, spent = 2.0, []
    for _ in range(80):
        cost = 1 / (1 + math.exp(-logit))
        spent.append(cost)
        drive(multiplier, [cost])
        logit += 0.3 * (2.0 - 3.0 * multiplier.value - logit)
    last = spent[-20:]
    assert abs(sum(last) / 20 - limit) <= 0.05 * limit


@given(
    st.lists(st.lists(st.floats(0, 10), max_size=4), max_size=30),
    st.floats(0, 2),
    st.floats(0, 3),
    st.floats(0, 3),
    st.integers(1, 4),
)
def test_lambda_stays_within_its_bounds(
    costs: list[list[float]], limit: float, proportional: float, derivative: float, every: int
) -> None:
    options = budget(limit, rate=0.7, proportional=proportional, derivative=derivative, every=every, cap=1.5)
    multiplier = Multiplier(options)
    for value in drive(multiplier, *costs):
        assert 0.0 <= value <= 1.5
    assert 0.0 <= multiplier.integral <= 1.5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"limit": -0.1}, r"`router.budgets\[0\].limit` must be greater than or equal to 0, got -0.1"),
        ({"limit": float("nan")}, "limit` must be a finite number"),
        ({"limit": 0.1, "rate": -1.0}, "rate` must be greater than or equal to 0"),
        ({"limit": 0.1, "every": 0}, "every` must be greater than 0, got 0"),
    ],
)
def test_bad_budgets_are_named(options: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_config(RunConfig, {"router": {"budgets": [options]}}, source="test")


def test_a_lambda_that_starts_above_its_cap_is_refused() -> None:
    with pytest.raises(ConfigError, match="initial 2 is above its cap 1"):
        build_config(BudgetConfig, {"limit": 0.1, "initial": 2.0, "cap": 1.0}, source="router.budgets")


def test_two_budgets_in_one_unit_are_refused_and_so_are_units_that_nothing_costs() -> None:
    with pytest.raises(ConfigError, match="there are two budgets in 'cost'; keep one per unit"):
        Budgets([budget(0.1), budget(0.2)])
    Budgets([budget(0.1)]).check_units(("cost", "search"))
    with pytest.raises(ConfigError, match="a budget is in 'usd', but costs are in cost, search"):
        Budgets([budget(0.1, unit="usd")]).check_units(("cost", "search"))


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_non_finite_cost_is_refused_and_changes_nothing(cost: float) -> None:
    multiplier = Multiplier(budget(0.3, rate=1.0))
    with pytest.raises(ValueError, match="a cost in 'cost' is not a finite number"):
        multiplier.observe([0.3, cost])
    multiplier.observe([0.3])
    multiplier.step()
    assert multiplier.value == 0.0


@pytest.mark.parametrize(
    ("spent", "limits", "expected"),
    [
        ({"cost": [1.0, 0.0]}, {"cost": 0.5}, 0.0),
        ({"cost": [0.525, 0.525]}, {"cost": 0.5}, 0.0),  # 5 % over is within
        ({"cost": [1.0, 0.46]}, {"cost": 0.5}, 0.46),  # 0.73 of 0.5
        ({"cost": [0.0, 0.2]}, {"cost": 0.0}, 0.1),  # for a budget of 0: the mean cost
        ({"cost": [0.0, 0.0]}, {"cost": 0.0}, 0.0),
        ({"usd": [3.0], "seconds": [30.0]}, {"usd": 2.0, "seconds": 10.0}, 2.0),  # the worst of several
        ({"usd": [1.0], "seconds": [15.0]}, {"usd": 2.0, "seconds": 10.0}, 0.5),
        ({"usd": [9.0]}, {}, 0.0),
    ],
)
def test_the_largest_overspending_as_a_share_of_its_budget(
    spent: dict[str, list[float]], limits: dict[str, float], expected: float
) -> None:
    budgets = Budgets([BudgetConfig(limit=limit, unit=unit) for unit, limit in limits.items()])
    costs = [dict(zip(spent, each, strict=True)) for each in zip(*spent.values(), strict=True)]
    assert budgets.overspend(costs) == pytest.approx(expected)
