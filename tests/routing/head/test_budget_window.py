"""The budget window: what a policy spends on earlier prompts, and the λ that would meet the budgets there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.routing.head.budget_window import BudgetWindow, solve_multipliers
from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.samples import RoutePrediction, RouterExample, RouteSample

NAN = float("nan")
LOGPROBS = (-1.0986122886681098,) * 3


def example(
    rewards: tuple[float, ...],
    costs: tuple[float, ...],
    *,
    features: torch.Tensor | None = None,
    stratified: bool = True,
) -> RouterExample:
    """One rollout per route; a route without one has a reward of NaN."""
    inputs = ((1,), torch.ones(2) if features is None else features)
    samples = tuple(
        RouteSample(route, reward, (cost,))
        for route, (reward, cost) in enumerate(zip(rewards, costs, strict=True))
        if reward == reward
    )
    return RouterExample(RoutePrediction(LOGPROBS, inputs), samples, (0.0, 0.0, 0.0) if stratified else None)


def head_with(bias: tuple[float, ...]) -> RouterHead:
    head = RouterHead(HeadSettings(width=2, routes=("a", "b", "c"), hidden=0))
    with torch.no_grad():
        head.out.bias.copy_(torch.tensor(bias))
    return head


def softmax_costs(rewards: np.ndarray, costs: np.ndarray, lambdas: list[float], tau: float) -> np.ndarray:
    """By definition, prompt by prompt."""
    spent = []
    for reward, cost in zip(rewards, costs, strict=True):
        seen = ~np.isnan(reward)
        odds = np.exp((reward[seen] - cost[seen] @ lambdas) / tau)
        spent.append((odds / odds.sum()) @ cost[seen])
    return np.mean(spent, axis=0)


def test_a_mean_by_hand() -> None:
    # π = 1/2, 1/4, 1/4. The first prompt spends 1/4 + 2/4, the second, without its third route, 1/3 of 3.
    window = BudgetWindow(10)
    window.add([example((0.0, 0.0, 0.0), (0.0, 1.0, 2.0)), example((0.0, 0.0, NAN), (0.0, 3.0, 0.0))])
    head = head_with(tuple(np.log([0.5, 0.25, 0.25])))
    assert window.means(head, ()) == pytest.approx([(0.75 + 1.0) / 2])


def test_rollouts_of_one_route_are_averaged() -> None:
    samples = (RouteSample(0, 0.0, (0.0,)), RouteSample(1, 1.0, (1.0,)), RouteSample(1, 0.0, (3.0,)))
    window = BudgetWindow(10)
    window.add([RouterExample(RoutePrediction(LOGPROBS, ((1,), torch.ones(2))), samples, (0.0, 0.0, None))])
    assert window.means(head_with((0.0, 0.0, 0.0)), ()) == pytest.approx([1.0])


def test_the_oldest_prompts_are_dropped() -> None:
    window = BudgetWindow(3)
    for cost in (9.0, 1.0, 2.0, 3.0):
        window.add([example((0.0, 0.0, 0.0), (cost, cost, cost))])
    assert len(window) == 3
    assert window.means(head_with((0.0, 0.0, 0.0)), ()) == pytest.approx([2.0])


def test_only_prompts_with_every_route_tried_and_with_features_are_kept() -> None:
    window = BudgetWindow(3)
    unknown = RouterExample(RoutePrediction(LOGPROBS, ((1,), None)), (RouteSample(0, 0.0, (0.0,)),), (0.0, None, None))
    window.add([example((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), stratified=False), unknown])
    assert len(window) == 0


def test_lambda_by_hand() -> None:
    # One prompt, a call that is worth 1 and costs 1: π(call) = σ((1 − λ)/τ) is 1/4 at λ = 1 + τ·ln 3. The tolerance of
    # 0.001 above the budget moves λ by τ·0.001/(3/16).
    (found,) = solve_multipliers(np.array([[0.0, 1.0]]), np.array([[[0.0], [1.0]]]), [0.25], 0.2)
    assert found == pytest.approx(1 + 0.2 * np.log(3) - 0.2 * 0.001 / (3 / 16), abs=1e-4)


def test_lambda_is_zero_within_the_budget_and_none_out_of_reach() -> None:
    rewards, costs = np.array([[0.0, 1.0]]), np.array([[[0.0], [1.0]]])
    assert solve_multipliers(rewards, costs, [1.0], 0.2) == [0.0]
    assert solve_multipliers(rewards, costs + 0.5, [0.4], 0.2) == [None]
    free = solve_multipliers(rewards, costs, [0.0], 0.2)
    assert free[0] is not None
    assert softmax_costs(rewards, costs, [free[0]], 0.2)[0] == pytest.approx(0.001, abs=1e-6)


TABLES = st.integers(0, 10_000).map(np.random.default_rng)


@settings(max_examples=40, deadline=None)
@given(TABLES, st.floats(0.05, 1.0), st.sampled_from([0.02, 0.2, 1.0]))
def test_the_solved_lambda_meets_the_budget(rng: np.random.Generator, share: float, tau: float) -> None:
    rewards, costs = rng.random((20, 3)), rng.random((20, 3, 1)) * 5
    rewards[0, 2], costs[0, 2] = NAN, NAN
    least = np.nanmin(costs, axis=1).mean()
    limit = float(least + share * (np.nanmax(costs, axis=1).mean() - least))
    (found,) = solve_multipliers(rewards, costs, [limit], tau)
    assert found is not None
    spent = softmax_costs(rewards, costs, [found], tau)[0]
    tolerance = 0.001 * np.nanmax(costs)
    assert spent <= limit + tolerance + 1e-6
    if found > 0:
        assert spent == pytest.approx(limit + tolerance, abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(TABLES)
def test_several_budgets_are_met_together(rng: np.random.Generator) -> None:
    rewards, costs = rng.random((30, 3)), rng.random((30, 3, 2))
    least = costs.min(axis=1).mean(axis=0)
    limits = softmax_costs(rewards, costs, [0.6, 0.3], 0.2) - 1e-3 * costs.max(axis=(0, 1))
    assert (limits > least).all()
    found = solve_multipliers(rewards, costs, limits.tolist(), 0.2)
    assert found == pytest.approx([0.6, 0.3], abs=0.02)


def test_it_goes_on_from_its_state() -> None:
    window, later = BudgetWindow(4), BudgetWindow(4)
    window.add([example((0.0, 1.0, NAN), (0.0, 1.0, 0.0)), example((0.0, 1.0, 0.2), (0.0, 1.0, 0.5))])
    later.load_state_dict(window.state_dict(), "cpu")
    head = head_with((0.1, 0.2, 0.3))
    assert later.means(head, ()) == window.means(head, ())
    assert later.solve([0.2], 0.3) == window.solve([0.2], 0.3)
    later.load_state_dict({}, "cpu")  # written without a window
    assert len(later) == 2
