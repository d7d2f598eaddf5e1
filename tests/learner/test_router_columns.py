"""The router's part of a batch: one entry per rollout, or per sampled token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from learner_cases import credit

from toolwise.advantages import compute_grpo_outcome_advantage
from toolwise.learner.batch import build_batch
from toolwise.types import CreditedRollout, RouterCredit, TurnRoute


def routed(rollout: CreditedRollout, credit: RouterCredit | None, logits: Any = (0.5, None, 1.0)) -> CreditedRollout:
    scored = rollout.annotated.scored
    changed = replace(scored.rollout, router_log_prob=-0.25, router_logits=logits)
    return replace(
        rollout, annotated=replace(rollout.annotated, scored=replace(scored, rollout=changed, router=credit))
    )


def rollouts() -> list[CreditedRollout]:
    return [
        credit([([5, 6], [7, 8], [-0.1, -0.2]), ([5, 6, 7, 8, 9], [10], [-0.3])], 0.0, name="a"),
        credit([([5, 6], [7, 9], [-0.4, -0.1])], 0.0, name="b"),
    ]


def test_columns_by_hand() -> None:
    searched, nothing = RouterCredit(True, True, False, 0.8, 0.3), RouterCredit(False, False, False, 0.2, -0.3)
    first, second = rollouts()
    columns = build_batch([routed(first, searched), routed(second, nothing)]).router
    assert columns is not None
    assert columns.router_log_prob.tolist() == [-0.25, -0.25]
    assert columns.router_logits.tolist() == [[0.5, -np.inf, 1.0]] * 2
    assert columns.used_any_tool.tolist() == columns.used_search.tolist() == [True, False]
    assert columns.used_calculate.tolist() == [False, False]
    assert np.allclose(columns.router_token_level_rewards, [0, 0, 0.8, 0, 0.2])
    assert np.allclose(columns.router_advantages, [0.3, 0.3, 0.3, -0.3, -0.3])
    assert columns.router_returns.equal(columns.router_advantages)


def test_the_advantages_are_grpos_over_the_token_rewards() -> None:
    first, second = rollouts()
    pair = [
        routed(first, RouterCredit(True, True, False, 0.8, 0.3)),
        routed(second, RouterCredit(False, False, False, 0.2, -0.3)),
    ]
    columns = build_batch(pair).router
    assert columns is not None
    rewards, mask = np.zeros((2, 3)), np.array([[1, 1, 1], [1, 1, 0]])
    rewards[mask == 1] = columns.router_token_level_rewards
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, ["x", "x"], norm_by_std=False)
    assert np.allclose(advantages[mask == 1], columns.router_advantages)
    assert np.allclose(returns[mask == 1], columns.router_returns)


def test_without_the_routers_part_of_every_rollout_there_are_none() -> None:
    first, second = rollouts()
    learned = RouterCredit(True, True, False, 0.8, 0.3)
    assert build_batch([routed(first, learned), second]).router is None
    assert build_batch([routed(first, learned), routed(second, RouterCredit(True, True, False))]).router is None


def routed_by_turn(rollout: CreditedRollout, credit: RouterCredit, *logprobs: float) -> CreditedRollout:
    changed = routed(rollout, credit, None)
    scored = changed.annotated.scored
    turns = tuple(TurnRoute(i, "ANSWER", value, (float(i), None, 1.0)) for i, value in enumerate(logprobs))
    turned = replace(scored.rollout, turn_routes=turns)
    return replace(changed, annotated=replace(changed.annotated, scored=replace(scored, rollout=turned)))


def test_columns_of_turns_by_hand() -> None:
    first, second = rollouts()
    pair = [
        # The last turn of the second rollout failed: it has a route and no step.
        routed_by_turn(
            first, RouterCredit(True, True, False, 0.5, turn_advantages=(0.1, -0.2), turn_returns=(0.5, 0.8)), -0.5, -1
        ),
        routed_by_turn(
            second, RouterCredit(False, False, False, 0.2, turn_advantages=(0.3,), turn_returns=(0.2,)), -2, -4
        ),
    ]
    batch = build_batch(pair)
    columns = batch.router
    assert columns is not None
    assert columns.turn_log_probs is not None
    assert columns.turn_log_probs.tolist() == [-0.5, -1.0, -2.0]
    assert columns.router_log_prob.tolist() == [-1.5, -2.0]
    assert columns.router_logits.tolist() == [[0.0, -np.inf, 1.0], [1.0, -np.inf, 1.0], [0.0, -np.inf, 1.0]]
    assert batch.step.tolist() == [0, 0, 1, 2, 2]
    assert np.allclose(columns.router_advantages, [0.1, 0.1, -0.2, 0.3, 0.3])
    assert np.allclose(columns.router_returns, [0.5, 0.5, 0.8, 0.2, 0.2])
    assert np.allclose(columns.router_token_level_rewards, [0, -0.3, 0.8, 0, 0.2])
    assert columns.used_search.tolist() == [True, False]


def test_turns_without_credit_or_log_probs_give_no_columns() -> None:
    first, second = rollouts()
    credit = RouterCredit(False, False, False, 0.2, turn_advantages=(0.3,), turn_returns=(0.2,))
    assert build_batch([routed_by_turn(second, credit, -2)]).router is not None
    assert build_batch([routed_by_turn(second, RouterCredit(False, False, False), -2)]).router is None
    assert build_batch([routed_by_turn(second, credit, -2), routed(first, credit)]).router is None
    given = routed_by_turn(second, credit, -2)
    scored = given.annotated.scored
    silent = replace(scored.rollout, turn_routes=(TurnRoute(0, "ANSWER"),))
    assert (
        build_batch([replace(given, annotated=replace(given.annotated, scored=replace(scored, rollout=silent)))]).router
        is None
    )
