"""The router's advantages: hand-worked tables and invariances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages import compute_grpo_outcome_advantage
from toolwise.advantages.arrays import CreditError
from toolwise.advantages.grpo import group_advantages
from toolwise.routing.families import ROUTES
from toolwise.routing.route_advantages import (
    independent_advantages,
    router_rewards,
    router_token_level_rewards,
    stratified_credit,
)


def test_router_rewards_by_hand() -> None:
    costs = {"cost": [0.0, 1.0, 2.0], "seconds": [0.0, 4.0, 0.5], "usd": [9.0, 9.0, 9.0]}
    rewards = router_rewards([1.0, 1.0, 0.0], costs, {"cost": 0.5, "seconds": 0.25})
    assert rewards.tolist() == [1.0, -0.5, -1.125]
    assert router_rewards([1.0, 0.0], {}, {}).tolist() == [1.0, 0.0]


def test_the_reward_is_at_the_last_sampled_token() -> None:
    mask = [[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]
    placed = router_token_level_rewards([0.5, -1.0, 2.0, 7.0], mask)
    assert placed.tolist() == [[0, 0.5, 0, 0], [0, 0, 0, -1.0], [0, 0, 2.0, 0], [0, 0, 0, 0]]


def test_independent_routes_by_hand() -> None:
    rewards = [1.0, 0.0, 0.5, 0.5, 3.0]
    groups = ["x", "x", "x", "x", "y"]
    assert independent_advantages(rewards, groups).tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]


def test_equal_rewards_give_exactly_zero() -> None:
    assert independent_advantages([0.1] * 7, ["x"] * 7).tolist() == [0.0] * 7
    credit = stratified_credit([0.1] * 7, {}, [0, 0, 1, 1, 1, 2, 2], ["x"] * 7, [[0.2, 0.3, 0.5]])
    assert credit.advantages.tolist() == [[0.0, 0.0, 0.0]]


def test_the_grpo_function_gives_the_same() -> None:
    """`compute_grpo_outcome_advantage` over `router_token_level_rewards`, never divided by the deviation."""
    rewards, groups = [1.0, 0.25, 0.5, 0.0, 2.0], [7, 7, 7, 9, 9]
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1]])
    router_advantages, router_returns = compute_grpo_outcome_advantage(
        router_token_level_rewards(rewards, mask), mask, groups, norm_by_std=False
    )
    wanted = independent_advantages(rewards, groups)
    for row, advantage in enumerate(wanted):
        assert router_advantages[row][mask[row] == 1] == pytest.approx(advantage)
    assert np.array_equal(router_advantages, router_returns)


def test_stratified_routes_by_hand() -> None:
    # prompt x, π (.5 .3 .2):  ANSWER 1, 0 → Q .5   SEARCH −.5, .5 → Q 0   CALCULATE 1 → Q 1     V = .25 + 0 + .2 = .45
    # costs:                   ANSWER 0, 0 → 0      SEARCH 1, 3 → 2        CALCULATE 1 → 1       ĉ = 0 + .6 + .2 = .8
    # prompt y, π (.1 .8 .1):  ANSWER 2 → Q 2       SEARCH 1 → Q 1         CALCULATE 0 → Q 0     V = .2 + .8 = 1
    credit = stratified_credit(
        rewards=[1.0, -0.5, 1.0, 0.0, 0.5, 2.0, 1.0, 0.0],
        costs={"cost": [0, 1, 1, 0, 3, 0, 1, 1]},
        routes=[0, 1, 2, 0, 1, 0, 1, 2],
        groups=["x"] * 5 + ["y"] * 3,
        probs=[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]],
    )
    assert credit.advantages == pytest.approx(np.array([[0.05, -0.45, 0.55], [1.0, 0.0, -1.0]]))
    assert credit.policy_costs["cost"] == pytest.approx([0.8, 0.9])


def test_the_expected_cost_is_not_that_of_the_batch() -> None:
    """Stratified, two thirds of all rollouts use a tool whatever the policy does."""
    costs = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    for p, policy in (([0.98, 0.01, 0.01], 0.02), ([0.0, 0.5, 0.5], 1.0)):
        credit = stratified_credit([0.0] * 6, {"cost": costs}, [0, 0, 1, 1, 2, 2], ["x"] * 6, [p])
        assert credit.policy_costs["cost"][0] == pytest.approx(policy)
    assert np.mean(costs) == pytest.approx(2 / 3)


def test_a_route_without_rollouts_is_not_counted() -> None:
    credit = stratified_credit([1.0, 0.0], {"cost": [0.0, 1.0]}, [0, 1], ["x", "x"], [[0.2, 0.2, 0.6]])
    assert credit.seen.tolist() == [[True, True, False]]
    assert credit.advantages == pytest.approx(np.array([[0.5, -0.5, 0.0]]))
    assert credit.policy_costs["cost"] == pytest.approx([0.5])


def test_centred_advantages_depend_on_lambda_and_divided_ones_do_not() -> None:
    """Only cost differs: the control must fail."""
    costs = {"cost": [0.0, 0.0, 1.0, 1.0]}

    def at(price: float, control: bool) -> np.ndarray[Any, Any]:
        rewards = router_rewards([1.0] * 4, costs, {"cost": price})
        return independent_advantages(rewards, ["x"] * 4, divide_by_std_as_a_control=control)

    assert at(5.0, False) == pytest.approx(5000 * at(0.001, False))
    assert at(5.0, True) == pytest.approx(at(0.001, True), rel=0.01)

    def stratified(price: float, control: bool) -> np.ndarray[Any, Any]:
        rewards = router_rewards([1.0] * 4, costs, {"cost": price})
        probs = [[0.5, 0.25, 0.25]]
        made = stratified_credit(rewards, costs, [0, 0, 1, 2], ["x"] * 4, probs, divide_by_std_as_a_control=control)
        return made.advantages

    assert stratified(5.0, False) == pytest.approx(5000 * stratified(0.001, False))
    assert stratified(5.0, True) == pytest.approx(stratified(0.001, True), rel=0.01)


rollout = st.tuples(st.integers(0, 4), st.integers(0, 2), st.floats(-5, 5), st.floats(0, 3))


@given(st.lists(rollout, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_other_prompts_change_nothing(rows: list[tuple[int, int, float, float]], rng: Any) -> None:
    """Permuted rollouts of the other prompts, and other rewards there: prompt 0 keeps its numbers to the last bit."""
    mine = [row for row in rows if row[0] == 0]
    theirs = [(p, a, r + 1.0, c) for p, a, r, c in rows if p != 0]
    rng.shuffle(theirs)
    changed = list(mine)
    for row in theirs:
        changed.insert(rng.randint(0, len(changed)), row)
    changed = _in_order(changed, mine)

    def credit(some: list[tuple[int, int, float, float]]) -> tuple[Any, Any]:
        prompts, routes, rewards, costs = map(list, zip(*some, strict=True))
        advantages = independent_advantages(rewards, prompts)
        pi = np.tile([0.5, 0.3, 0.2], (len(set(prompts)), 1))
        stratified = stratified_credit(rewards, {"cost": costs}, routes, prompts, pi)
        own = [a for a, p in zip(advantages.tolist(), prompts, strict=True) if p == 0]
        if 0 not in prompts:
            return own, None
        place = list(dict.fromkeys(prompts)).index(0)
        return own, (stratified.advantages[place].tolist(), stratified.policy_costs["cost"][place])

    assert credit(rows) == credit(changed)


def _in_order(changed: list[Any], mine: list[Any]) -> list[Any]:
    """`changed` with prompt 0's rollouts in their first order, wherever they stand."""
    first = iter(mine)
    return [next(first) if row[0] == 0 else row for row in changed]


@given(st.lists(rollout, min_size=1, max_size=30), st.floats(0, 5))
def test_the_policys_mean_advantage_is_zero(rows: list[tuple[int, int, float, float]], price: float) -> None:
    prompts, routes, tasks, costs = map(list, zip(*rows, strict=True))
    rewards = router_rewards(tasks, {"cost": costs}, {"cost": price})
    independent = independent_advantages(rewards, prompts)
    for prompt in set(prompts):
        assert sum(a for a, p in zip(independent, prompts, strict=True) if p == prompt) == pytest.approx(0, abs=1e-9)
    pi = np.random.default_rng(0).dirichlet([1, 1, 1], len(set(prompts)))
    credit = stratified_credit(rewards, {}, routes, prompts, pi)
    assert (pi * credit.advantages).sum(axis=1) == pytest.approx(np.zeros(len(pi)), abs=1e-9)


@given(st.lists(rollout, min_size=2, max_size=30), st.floats(-5, 5))
def test_an_actors_advantage_does_not_depend_on_other_routes(
    rows: list[tuple[int, int, float, float]], change: float
) -> None:
    """Actors are credited on r_task within (prompt, route): groups of their own for every estimator."""
    groups = [(prompt, ROUTES[route]) for prompt, route, _, _ in rows]
    before = group_advantages([r for _, _, r, _ in rows], groups)
    after = group_advantages([r + change * (route != 1) for _, route, r, _ in rows], groups)
    kept = [i for i, row in enumerate(rows) if row[1] == 1]
    assert before[kept].tolist() == after[kept].tolist()


def test_the_stratified_gradient_is_that_of_the_expected_reward() -> None:
    """−Σ π·A and −Σ π·Q̂ have the same gradient in the logits: finite differences of the second."""
    logits = np.array([0.3, -0.2, 0.5])
    rewards, routes = [1.0, 0.2, -0.4, 0.6, 0.1, 0.9], [0, 0, 1, 1, 2, 2]

    def probs(z: Any) -> Any:
        return np.exp(z) / np.exp(z).sum()

    pi = probs(logits)
    credit = stratified_credit(rewards, {}, routes, ["x"] * 6, pi[None])
    by_hand = pi * credit.advantages[0]  # d/dz Σ π·A, with A held: π_k (A_k − Σ π A)
    differences = [
        (probs(logits + 1e-6 * np.eye(3)[k]) - probs(logits - 1e-6 * np.eye(3)[k])) @ [0.6, 0.1, 0.5] / 2e-6
        for k in range(3)
    ]
    assert by_hand == pytest.approx(differences, abs=1e-9)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: router_rewards([1.0, 2.0], {"cost": [1.0]}, {"cost": 1.0}), "cost in 'cost'"),
        (lambda: router_rewards([float("nan")], {}, {}), "r_task: entry 0 is not finite"),
        (lambda: independent_advantages([1.0], ["x", "x"]), "router rewards"),
        (lambda: stratified_credit([1.0], {}, [3], ["x"], [[1, 0, 0]]), "one route from 0 to 2 for each of 1 rollouts"),
        (lambda: stratified_credit([1.0], {}, [0], ["x"], [[1, 0]]), "expected 1 prompts × 3 routes"),
    ],
)
def test_inconsistent_inputs_are_refused(call: Any, told: str) -> None:
    with pytest.raises(CreditError, match=told):
        call()
