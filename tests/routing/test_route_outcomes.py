"""The advantages of a step by hand, and invariances."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from toolwise.config.router import RouterConfig
from toolwise.routing.route_advantages import (
    KindStandardizer,
    RouteOutcome,
    RouterAdvantages,
    RunningBaseline,
    credit_routes,
    policy_weights,
)

PROBS = {"p": (0.5, 0.25, 0.25), "q": (0.2, 0.4, 0.4)}
CAME = [
    RouteOutcome("p", 0, 0.0, {"cost": 0.0}),
    RouteOutcome("p", 1, 1.0, {"cost": 1.0}),
    RouteOutcome("p", 1, 0.0, {"cost": 1.0}),
    RouteOutcome("p", 2, 1.0, {"cost": 2.0}),
    RouteOutcome("q", 0, 1.0, {"cost": 0.0}),
    RouteOutcome("q", 1, 1.0, {"cost": 1.0}),
]


def credited(outcomes: list[RouteOutcome], price: float = 0.5, probs: Any = PROBS, **how: Any) -> RouterAdvantages:
    return credit_routes(outcomes, probs, {"cost": price}, RouterConfig(**how), RunningBaseline(), ["cost"])


def test_stratified_credit_by_hand() -> None:
    """Q̂(p) = 0, 0.5 − 0.5, 1 − 1; Σπ·Q̂ = 0. Of q the third route was not seen: π over the first two."""
    outcome = credited(CAME)
    assert outcome.route_advantages["p"] == pytest.approx((0.0, 0.0, 0.0))
    assert outcome.route_advantages["q"][:2] == pytest.approx((1.0 - 2 / 3, 0.5 - 2 / 3))
    assert outcome.route_advantages["q"][2] is None
    assert outcome.spent["cost"] == pytest.approx([0.25 * 1 + 0.25 * 2, 2 / 3])


def test_the_expected_cost_is_not_that_of_the_batch() -> None:
    """Stratified over all routes, two thirds of the rollouts use tools whatever the policy does."""
    outcomes = [RouteOutcome("p", route, 1.0, {"cost": float(route > 0)}) for route in range(3)]
    thrifty = credited(outcomes, probs={"p": (0.98, 0.01, 0.01)})
    assert thrifty.spent["cost"] == pytest.approx([0.02])


def test_sampled_routes_are_compared_within_their_prompt() -> None:
    outcome = credited(CAME, routes="independent")
    assert outcome.rollout_advantages[:4] == pytest.approx([0.0, 0.5, -0.5, 0.0])
    assert outcome.rollout_advantages[4:] == pytest.approx([0.25, -0.25])
    assert outcome.spent["cost"] == [c.costs["cost"] for c in CAME]


@pytest.mark.parametrize("routes", ["stratified", "independent"])
def test_other_prompts_change_nothing(routes: Any) -> None:
    alone, rng = credited(CAME[:4], routes=routes), Random(0)
    for _ in range(20):
        others = [replace(c, reward=rng.random(), costs={"cost": rng.random()}) for c in CAME[4:]]
        mixed = [*CAME[:4], *others]
        order = list(range(len(mixed)))
        rng.shuffle(order)
        outcome = credited([mixed[i] for i in order], routes=routes)
        if routes == "stratified":
            assert outcome.route_advantages["p"] == pytest.approx(alone.route_advantages["p"], abs=1e-12)
        else:
            again = {i: outcome.rollout_advantages[place] for place, i in enumerate(order)}
            assert [again[i] for i in range(4)] == pytest.approx(list(alone.rollout_advantages), abs=1e-12)


@pytest.mark.parametrize("routes", ["stratified", "independent"])
def test_divided_by_the_std_lambda_has_no_effect(routes: Any) -> None:
    """Where only cost differs the control gives the same advantages at λ = 0.001 and λ = 5; ours do not."""
    same_reward = [replace(c, reward=1.0) for c in CAME[:4]]

    def found(price: float, control: bool) -> list[float]:
        outcome = credited(same_reward, price, routes=routes, divide_by_std=control)
        return [a or 0.0 for a in outcome.route_advantages.get("p", outcome.rollout_advantages)]

    assert found(0.001, True) == pytest.approx(found(5.0, True), abs=5e-3)
    assert found(5.0, False) == pytest.approx([5000 * a for a in found(0.001, False)])
    assert max(map(abs, found(5.0, True))) > 0.5


def test_one_route_for_all_rollouts_uses_the_running_baseline() -> None:
    baseline = RunningBaseline()
    training = RouterConfig(routes="one")
    first = [RouteOutcome("p", 1, 1.0, {"cost": 1.0}), RouteOutcome("p", 1, 1.0, {"cost": 1.0})]
    credit_routes(first, PROBS, {"cost": 0.5}, training, baseline, ["cost"])
    better = [RouteOutcome("q", 0, 2.0, {"cost": 0.0}), RouteOutcome("q", 0, 2.0, {"cost": 0.0})]
    outcome = credit_routes(better, PROBS, {"cost": 0.5}, training, baseline, ["cost"])
    assert outcome.rollout_advantages == pytest.approx([1.0 + 0.5, 1.0 + 0.5])  # within the prompt it would be 0


def test_rewards_are_weighted_by_the_policys_probabilities() -> None:
    weights = policy_weights(CAME, PROBS, "stratified")
    assert weights == pytest.approx([0.5, 0.125, 0.125, 0.25, 1 / 3, 2 / 3])
    assert policy_weights(CAME, PROBS, "independent") == [1.0] * 6


def test_no_outcomes() -> None:
    outcome = credited([], probs={})
    assert outcome.route_advantages == {}
    assert outcome.spent["cost"] == []


def test_running_means_by_hand() -> None:
    # decay .5: after means 1 and 0: (.5·.5·1 + .5·0) / .75 = 1/3; costs 2 and 0: 2/3
    baseline = RunningBaseline(decay=0.5)
    baseline.update([1.0, 1.0], {"cost": [2.0, 2.0]})
    baseline.update([0.0], {"cost": [0.0]})
    advantages = baseline.advantages([1.0, 0.0], {"cost": [1.0, 0.0]}, {"cost": 0.3})
    assert advantages == pytest.approx([2 / 3 - 0.3 * (1 - 2 / 3), -1 / 3 + 0.3 * 2 / 3])


def test_a_changing_lambda_adds_no_advantage() -> None:
    """If costs never change, neither do advantages, whatever λ is."""
    baseline = RunningBaseline()
    for _ in range(20):
        baseline.update([1.0], {"cost": [1.0]})
    for price in (0.0, 0.1, 5.0):
        assert baseline.advantages([1.0], {"cost": [1.0]}, {"cost": price}) == pytest.approx([0.0])


def test_the_first_batch_is_its_own_baseline_and_no_later_one() -> None:
    baseline = RunningBaseline()
    assert baseline.advantages([1.0, 0.0], {}, {}).tolist() == [0.5, -0.5]
    baseline.update([1.0, 0.0], {})
    assert baseline.advantages([1.0], {}, {}) == pytest.approx([0.5])
    baseline.update([], {})
    assert baseline.advantages([1.0], {}, {}) == pytest.approx([0.5])


def test_baselines_resume_from_their_state() -> None:
    before, after = RunningBaseline(), RunningBaseline()
    before.update([1.0, 0.5], {"cost": [1.0, 0.0]})
    after.load_state_dict(before.state_dict())
    args = ([0.2], {"cost": [1.0]}, {"cost": 0.4})
    assert before.advantages(*args).tolist() == after.advantages(*args).tolist()


def test_each_kind_has_its_own_scale() -> None:
    rng = np.random.default_rng(0)
    kinds = ["tool", "talk"] * 500
    rewards = np.where(np.array(kinds) == "tool", rng.normal(-1, 3, 1000), rng.normal(1, 0.1, 1000))
    scaled = KindStandardizer()(rewards, kinds)
    for kind in ("tool", "talk"):
        mine = scaled[np.array(kinds) == kind]
        assert mine.mean() == pytest.approx(0, abs=1e-9)
        assert mine.std(ddof=1) == pytest.approx(1)


def test_scales_use_everything_seen_and_resume() -> None:
    scale, again = KindStandardizer(), KindStandardizer()
    scale([0.0, 2.0], ["a", "a"])
    again.load_state_dict(scale.state_dict())
    # seen of a: 0, 2, 4 -> mean 2, deviation 2
    assert scale([4.0], ["a"]).tolist() == again([4.0], ["a"]).tolist() == [1.0]


def test_a_kind_that_never_varies_gives_zero() -> None:
    assert KindStandardizer()([1.0, 1.0, 3.0], ["a", "a", "b"]).tolist() == [0.0, 0.0, 0.0]
