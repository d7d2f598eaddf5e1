"""Random budgets: a λ for each, a head that knows them all, and lotteries between them."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolwise.config.loader import build_config
from toolwise.config.router import RouterConfig
from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.routing.budget_bins import BudgetBins
from toolwise.routing.calibration import BudgetCalibration
from toolwise.routing.head.head import HeadSettings, RouterHead, predict_routes
from toolwise.routing.head.loss import RouterBatch
from toolwise.routing.joint_threshold import JointThreshold
from toolwise.routing.route_advantages import RouterAdvantages, merge_advantages
from toolwise.routing.samples import RoutePrediction, RouterExample


def router(**changed: Any) -> RouterConfig:
    settings = {"budgets": [{"limit": 0.4, "rate": 0.5, "proportional": 0.0}]}
    settings |= {"random_budgets": {"low": 0.0, "high": 1.0, "bins": 3}}
    return build_config(RouterConfig, settings | changed, source="router")


def question(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def test_the_default_budget_is_always_one_of_them() -> None:
    assert BudgetBins(router()).values == (0.0, 0.4, 0.5, 1.0)
    assert BudgetBins(router(budgets=[{"limit": 0.5}])).values == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"budgets": []}, "add one to budgets"),
        ({"random_budgets": {"low": 0.5, "high": 0.5}}, "low 0.5 is not below high 0.5"),
        ({"random_budgets": {"low": 0.5, "high": 1.0}}, "the first budget is 0.4, outside random_budgets (0.5 to 1)"),
        ({"mode": "value"}, 'mode = "value" serves every budget anyway'),
        ({"sampling": "one"}, 'neither sampling = "one" nor budget_window'),
        ({"random_budgets": None, "budgets": [], "budget_prompt": True}, "add one to budgets"),
    ],
)
def test_settings_that_contradict_each_other(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        router(**changed)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@given(drawn=st.integers(0, 3), spent=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=5))
def test_each_budget_moves_its_own_lambda_only(drawn: int, spent: list[float]) -> None:
    bins = BudgetBins(router())
    bins.multipliers[drawn].observe(spent)
    bins.step()
    expected = max(0.0, 0.5 * (fmean(spent) - bins.values[drawn]))
    assert bins.multipliers[drawn].value == pytest.approx(expected)
    assert all(m.value == 0.0 and m.error is None for i, m in enumerate(bins.multipliers) if i != drawn)
    assert bins.lambdas({"cost": 9.0, "usd": 2.0}, drawn) == {"cost": pytest.approx(expected), "usd": 2.0}


def test_a_budget_between_two_is_a_lottery_with_its_mean() -> None:
    bins = BudgetBins(router())
    assert bins.weights(0.4) == [(1, 1.0)]
    assert bins.weights(0.75) == [(2, 0.5), (3, 0.5)]
    picked = [bins.pick(0.7, question(f"What is {i}?")) for i in range(2000)]
    assert set(picked) == {2, 3}
    assert fmean(bins.values[index] for index in picked) == pytest.approx(0.7, abs=0.03)
    assert bins.pick(None, question("x")) == 1
    assert picked[7] == bins.pick(0.7, question("What is 7?"))


@pytest.mark.parametrize("budget", [-0.1, 1.1])
def test_a_budget_beyond_them_is_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="outside 0 to 1, which the router was trained for"):
        BudgetBins(router()).pick(budget, question("x"))


def test_feasibility_by_hand() -> None:
    bins = BudgetBins(router())
    shares = bins.feasibility([0, 0, 1, 1, 3], [0.0, 1.0, 0.0, 2.0, 1.0], [0.75, 0.25, 1.0, 1.0, 1.0])
    assert shares == {"router/cost@0/within": 0.75, "router/cost@0.4/within": 0.5, "router/cost@1/within": 1.0}


def calibration(limit: float) -> BudgetCalibration:
    threshold = JointThreshold(((limit,),), ((0.0,),), (1.0,))
    return BudgetCalibration(
        units=("cost",),
        limits=(limit,),
        threshold=threshold,
        route_costs=((0.0,), (1.0,)),
        rows=10,
        rolled_out=10,
        costs=(limit,),
        standard_errors=(0.01,),
        score=0.5,
    )


def test_lambdas_and_thresholds_are_stored() -> None:
    bins, other = BudgetBins(router()), BudgetBins(router())
    bins.multipliers[2].observe([3.0])
    bins.step()
    bins.calibrations = tuple(map(calibration, bins.values))
    other.load_state_dict(bins.state_dict())
    assert other.state_dict() == bins.state_dict()
    assert other.calibrations == bins.calibrations
    elsewhere = BudgetBins(router(random_budgets={"low": 0.0, "high": 2.0}))
    elsewhere.load_state_dict(bins.state_dict())  # other budgets: starts anew
    assert elsewhere.calibrations == ()
    assert all(m.value == 0.0 for m in elsewhere.multipliers)


def test_a_prediction_for_one_of_the_budgets() -> None:
    prediction = RoutePrediction.for_bins([[0.0, 0.0], [0.0, math.log(3.0)]])
    assert prediction.probs == pytest.approx((0.5, 0.5))
    assert prediction.at(1).probs == pytest.approx((0.25, 0.75))
    assert (prediction.bin, prediction.at(1).bin, prediction.at(None).bin) == (0, 1, 0)
    masked = prediction.restricted((False, True)).at(1)
    assert masked.probs == pytest.approx((0.0, 1.0))
    plain = RoutePrediction((math.log(0.5),) * 2)
    assert plain.at(3) is plain


def test_a_head_learns_for_the_budget_of_each_example_only() -> None:
    head = RouterHead(HeadSettings(width=4, routes=("a", "b"), bins=3))
    features = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    assert head(features).shape == (2, 3, 2)
    predictions = predict_routes(head, features)
    examples = [RouterExample(p.at(2), ()) for p in predictions]
    batch = RouterBatch(examples, head.out.weight)
    batch.of_bins(head(features)).log_softmax(-1)[:, 0].sum().backward()
    gradient = head.out.weight.grad
    assert gradient is not None
    moved = gradient.view(3, 2, -1).abs().sum(dim=(1, 2))
    assert moved[0] == moved[1] == 0
    assert moved[2] > 0


def test_parts_of_a_step_are_put_together_in_order() -> None:
    first = RouterAdvantages({"p": (1.0, None)}, [0.1, 0.3], {"cost": [1.0]})
    second = RouterAdvantages({"q": (0.5, -0.5)}, [0.2], {"cost": [2.0]})
    merged = merge_advantages([([0, 2], first), ([1], second)], ["cost"])
    assert list(merged.rollout_advantages) == [0.1, 0.2, 0.3]
    assert merged.route_advantages == {"p": (1.0, None), "q": (0.5, -0.5)}
    assert merged.spent == {"cost": [1.0, 2.0]}


def test_budgets_are_drawn_evenly() -> None:
    bins, rng = BudgetBins(router()), Random(0)
    drawn = [bins.draw(rng) for _ in range(4000)]
    assert all(abs(drawn.count(index) - 1000) < 120 for index in range(4))
