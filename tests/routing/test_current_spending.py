"""What the router as it is now would spend: tables worked by hand, properties, and λ in runs whose policy changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from async_cases import async_run, by_length, train
from hypothesis import given
from hypothesis import strategies as st

from toolwise.routing import turn_router
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.current_spending import current_costs, current_prediction, weighted_costs
from toolwise.routing.learned_router import LearnedRouter
from toolwise.routing.route_advantages import RouteOutcome
from toolwise.routing.samples import RoutePrediction
from toolwise.training.loop import StepResult

UNITS = ("cost", "usd")
log = math.log


def outcome(prompt: str, route: int, cost: float, usd: float = 0.0) -> RouteOutcome:
    return RouteOutcome(prompt, route, 0.0, {"cost": cost, "usd": usd})


# prompt a: route 0 costs 2 and 4, route 1 costs 10; prompt b: route 0 costs 1, route 1 costs 3
OUTCOMES = [
    outcome("a", 0, 2.0, 1.0),
    outcome("a", 0, 4.0),
    outcome("a", 1, 10.0),
    outcome("b", 0, 1.0),
    outcome("b", 1, 3.0),
]
EVEN = {"a": (0.5, 0.5), "b": (0.5, 0.5)}


def test_stratified_routes_cost_what_the_current_policy_takes() -> None:
    """Per prompt Σ π·mean: a 0.9·3 + 0.1·10 = 3.7, b 0.25·1 + 0.75·3 = 2.5; whatever the old policy was."""
    now = {"a": (0.9, 0.1), "b": (0.25, 0.75)}
    for old in (EVEN, {"a": (0.01, 0.99), "b": (0.99, 0.01)}):
        costs = current_costs(OUTCOMES, old, now, "stratified", UNITS)
        assert costs["cost"] == pytest.approx([3.7, 2.5])
        assert costs["usd"] == pytest.approx([0.9 * 0.5, 0.0])


def test_a_stratified_route_that_is_no_longer_taken_costs_nothing() -> None:
    costs = current_costs(OUTCOMES, EVEN, {"a": (1.0, 0.0), "b": (0.0, 1.0)}, "stratified", UNITS)
    assert costs["cost"] == pytest.approx([3.0, 3.0])


def test_sampled_routes_are_weighted_truncated_and_normalised() -> None:
    """a: ratios 1.8, 1.8 and 0.2; b: 0.5 and 3, truncated at 2. Their mean is 6.3 / 5 = 1.26."""
    old = {"a": (0.5, 0.5), "b": (0.8, 0.2)}
    now = {"a": (0.9, 0.1), "b": (0.4, 0.6)}
    costs = current_costs(OUTCOMES, old, now, "independent", UNITS)["cost"]
    expected = [1.8 * 2, 1.8 * 4, 0.2 * 10, 0.5 * 1, 2.0 * 3]
    assert costs == pytest.approx([value / 1.26 for value in expected])


@pytest.mark.parametrize("sampling", ["independent", "one"])
def test_a_sampled_route_that_is_no_longer_taken_weighs_nothing(sampling: str) -> None:
    now = {"a": (1.0, 0.0), "b": (1.0, 0.0)}
    costs = current_costs(OUTCOMES, EVEN, now, sampling, UNITS)["cost"]
    assert costs == pytest.approx([2 * 5 / 3, 4 * 5 / 3, 0.0, 5 / 3, 0.0])
    assert sum(costs) / 5 == pytest.approx((2 + 4 + 1) / 3)


@pytest.mark.parametrize("sampling", ["independent", "one"])
def test_equal_policies_give_the_plain_costs(sampling: str) -> None:
    probs = {"a": (0.3, 0.7), "b": (0.9, 0.1)}
    assert current_costs(OUTCOMES, probs, probs, sampling, UNITS)["cost"] == pytest.approx([2, 4, 10, 1, 3])


amounts = st.lists(st.tuples(st.floats(0, 100), st.floats(-40, 40)), min_size=1, max_size=8)


@given(amounts)
def test_weights_have_a_mean_of_one_and_a_bound(pairs: list[tuple[float, float]]) -> None:
    """With costs of 1 the result is the weights: mean 1, in the order of the ratios, the largest at most 2 / their
    truncated mean. The mean cost lies between the extremes."""
    costs, logs = [cost for cost, _ in pairs], [ratio for _, ratio in pairs]
    weights = weighted_costs([{"cost": 1.0}] * len(logs), logs, ["cost"])["cost"]
    assert sum(weights) / len(weights) == pytest.approx(1.0)
    truncated = [min(math.exp(ratio), 2.0) for ratio in logs]
    assert weights == pytest.approx([value * len(truncated) / sum(truncated) for value in truncated])
    spent = weighted_costs([{"cost": cost} for cost in costs], logs, ["cost"])["cost"]
    assert min(costs) - 1e-6 <= sum(spent) / len(spent) <= max(costs) + 1e-6


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(-40, math.log(2)))
def test_one_ratio_for_all_changes_nothing(costs: list[float], ratio: float) -> None:
    spent = weighted_costs([{"cost": cost} for cost in costs], [ratio] * len(costs), ["cost"])["cost"]
    assert spent == pytest.approx(costs)


def test_nothing_spent_is_nothing() -> None:
    assert weighted_costs([], [], UNITS) == {"cost": [], "usd": []}
    assert current_costs([], {}, {}, "stratified", UNITS) == {"cost": [], "usd": []}


@dataclass
class ScriptedModel:
    """Says what it was asked for, and gives one answer."""

    prediction: RoutePrediction
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def predict(self, prompts: Any, multipliers: Any, *, averaged: bool = False) -> list[RoutePrediction]:
        self.asked.append(("prompts", list(prompts), tuple(multipliers)))
        return [self.prediction]

    def predict_encoded(
        self, prompt: Any, features: Any, multipliers: Any, *, averaged: bool = False
    ) -> RoutePrediction:
        self.asked.append(("features", prompt, features, tuple(multipliers)))
        return self.prediction


def test_the_current_prediction_is_of_the_same_prompt_budget_and_routes() -> None:
    old = RoutePrediction(tuple(map(log, (0.2, 0.3, 0.5))), ([1, 2], None), applicable=(True, False, True))
    now = RoutePrediction(tuple(map(log, (0.25, 0.5, 0.25))))
    model: Any = ScriptedModel(now)
    assert current_prediction(model, old, [0.5]).probs == pytest.approx((0.5, 0.0, 0.5))
    known = RoutePrediction(old.logprobs, ([1, 2], "features"))
    assert current_prediction(model, known, [0.5]).probs == pytest.approx((0.25, 0.5, 0.25))
    assert model.asked == [("prompts", [[1, 2]], (0.5,)), ("features", [1, 2], "features", (0.5,))]
    bins = RoutePrediction.for_bins([(0.0, 0.0), (log(3.0), 0.0)])
    drawn = RoutePrediction((0.0, 0.0), ([1], None), bin=1)
    assert current_prediction(ScriptedModel(bins), drawn, []).probs == pytest.approx((0.75, 0.25))  # type: ignore[arg-type]


# --- whole runs: at a version the policy turns from dear routes to the free one, while older batches are under way

TURNS_AT, STALENESS, STEPS = 3, 2, 6
BEFORE, AFTER = (0.25, 0.75), (0.875, 0.125)


class TurningModel:
    """The router's model, except that its predictions follow the version of the weights."""

    def __init__(self, model: Any, version: Any) -> None:
        self._model, self._version = model, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _turned(self, prediction: RoutePrediction) -> RoutePrediction:
        share, rest = BEFORE if self._version() < TURNS_AT else AFTER
        routes = len(prediction.logprobs)
        logs = (log(share), *[log(rest / (routes - 1))] * (routes - 1))
        return RoutePrediction(logs, prediction.head_inputs, logits=logs)

    def predict(self, *arguments: Any, **options: Any) -> list[RoutePrediction]:
        return [self._turned(prediction) for prediction in self._model.predict(*arguments, **options)]

    def predict_encoded(self, *arguments: Any, **options: Any) -> RoutePrediction:
        return self._turned(self._model.predict_encoded(*arguments, **options))


def settings(**router: Any) -> dict[str, Any]:
    budget = {"limit": 0.5, "rate": 0.5, "proportional": 0.0, "derivative": 0.0, "initial": 1.0}
    common = {"enable": True, "hidden": 16, "calibration": 0.0, "cost": "calls", "budgets": [budget]}
    return {
        "deterministic": True,
        "rollout": {"n": 6, "max_new_tokens": 6},
        "data": {"batch_size": 4},
        "router": {**common, **router},
    }


def results_of_a_run(monkeypatch: pytest.MonkeyPatch, *, corrected: bool, sampling: str) -> list[StepResult]:
    """Each rollout costs 1, except those on the first route."""
    run = async_run(STALENESS, by_length, steps=STEPS, **settings(sampling=sampling))
    router = run.router
    assert isinstance(router, LearnedRouter)
    assert router.stale
    router.stale = corrected
    router.model = TurningModel(router.model, lambda: run.queue.version)  # type: ignore[assignment]
    free, units = router.routes.names[0], router.cost.units

    def costs_of(self: Any, cost: Any, rollout: Any, **_: Any) -> dict[str, float]:
        return {**dict.fromkeys(units, 0.0), "cost": float(rollout.route != free)}

    monkeypatch.setattr(Conditioning, "costs_of", costs_of)
    return train(run, STEPS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("corrected", "means"),
    [(True, [0.75] * 3 + [0.125] * 3), (False, [0.75] * 5 + [0.125])],
    ids=["as it is", "by the stale policy's spending"],
)
def test_lambda_follows_the_current_spending_of_stratified_routes(
    corrected: bool, means: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 and 4 learn from rollouts that the dear policy routed; λ must fall there already."""
    results = results_of_a_run(monkeypatch, corrected=corrected, sampling="stratified")
    assert [result.metrics["staleness/max"] for result in results] == [0, 1, 2, 2, 2, 2]
    assert [result.metrics["router/cost/mean"] for result in results] == pytest.approx(means)
    lambdas = [1.0]
    for mean in means:
        lambdas.append(lambdas[-1] + 0.5 * (mean - 0.5))
    assert [result.metrics["router/cost/lambda"] for result in results] == pytest.approx(lambdas[1:])


@pytest.mark.long
def test_lambda_follows_the_current_spending_of_sampled_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    results = results_of_a_run(monkeypatch, corrected=True, sampling="independent")
    for step, result in enumerate(results):
        routes = [s.rollout.route for s in result.scored]
        free = routes.count("ANSWER")
        dear = len(routes) - free
        stale = TURNS_AT <= step < TURNS_AT + STALENESS
        weighed = (2.0 * free, dear * AFTER[1] / BEFORE[1]) if stale else (free, dear)
        assert result.metrics["router/cost/mean"] == pytest.approx(weighed[1] / sum(weighed))
        assert (result.metrics["router/cost/mean"] > 0.5) == (step < TURNS_AT)
        assert (dear / len(routes) > 0.5) == (step < TURNS_AT + STALENESS)


@pytest.mark.long
def test_a_rollout_with_routes_of_turns_has_the_ratio_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []

    def recorded(costs: Any, log_ratios: Sequence[float], units: Any) -> Any:
        seen.append(sorted(log_ratios))
        return weighted_costs(costs, log_ratios, units)

    monkeypatch.setattr(turn_router, "weighted_costs", recorded)
    run = async_run(STALENESS, by_length, steps=STEPS, **settings(every="turn"))
    router = run.router
    assert isinstance(router, turn_router.TurnRouter)
    first = router.routes.names[0]
    router.model = TurningModel(router.model, lambda: run.queue.version)  # type: ignore[attr-defined]
    results = train(run, STEPS)
    assert len(seen) == STEPS
    for step, (result, logs) in enumerate(zip(results, seen, strict=True)):
        expected = []
        for s in result.scored:
            routes = [turn.route for turn in s.rollout.turn_routes[: len(s.steps)]]
            ratios = [AFTER[route != first] / BEFORE[route != first] for route in routes]
            expected.append(log(math.prod(ratios)) if TURNS_AT <= step < TURNS_AT + STALENESS else 0.0)
        assert logs == pytest.approx(sorted(expected), abs=1e-9)
