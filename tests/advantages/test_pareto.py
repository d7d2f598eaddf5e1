"""Pareto rank: a hand-worked table, the definition by brute force, and properties for any rewards and costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages import Grpo, Hdpo, Pareto
from toolwise.advantages.arrays import CreditError
from toolwise.advantages.pareto import pareto_ranks
from toolwise.types import AnnotatedRollout, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]
COARSE = st.integers(-3, 3).map(float)
POINTS = st.lists(st.tuples(COARSE, COARSE) | st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e6)), max_size=30)


def by_definition(points: list[tuple[float, float]]) -> list[int]:
    """Removes layer after layer."""
    ranks, rank = [0] * len(points), 0
    while 0 in ranks:
        rank += 1
        left = [i for i, r in enumerate(ranks) if r == 0]
        for i in [i for i in left if not any(dominates(points[j], points[i]) for j in left)]:
            ranks[i] = rank
    return ranks


def dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] >= b[0] and a[1] <= b[1] and a != b


def ranks_of(points: list[tuple[float, float]]) -> list[int]:
    scores, costs = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return pareto_ranks(scores, costs).tolist()


def advantages(estimator: Pareto | Grpo, rollouts: list[AnnotatedRollout]) -> list[float]:
    return [float(rollout.steps[0].advantage or 0.0) for rollout in estimator(rollouts).rollouts]


def test_a_hand_worked_table(step: Step, rollout: Make) -> None:
    # Right for nothing dominates right for a call, and wrong for nothing; each of those dominates wrong for a call.
    # Ranks 1, 2, 2, 3: mean 2, sample variance 2/3.
    rows = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
    assert ranks_of(rows) == [1, 2, 2, 3]
    unit = 1 / (math.sqrt(2 / 3) + 1e-6)
    batch = [rollout(score, steps=[step()], cost=cost) for score, cost in rows]
    assert advantages(Pareto(), batch) == pytest.approx([unit, 0.0, 0.0, -unit], abs=1e-12)


def test_what_neither_dominates_is_exactly_zero(step: Step, rollout: Make) -> None:
    batch = [rollout(score, steps=[step()], cost=cost) for score, cost in [(1.0, 1.0), (0.0, 0.0), (2.0, 5.0)]]
    assert advantages(Pareto(), batch) == [0.0, 0.0, 0.0]


@given(POINTS)
def test_ranks_are_those_of_the_definition(points: list[tuple[float, float]]) -> None:
    assert ranks_of(points) == by_definition(points)


@given(POINTS, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(points: list[tuple[float, float]], rng: Random) -> None:
    order = list(range(len(points)))
    rng.shuffle(order)
    assert ranks_of([points[i] for i in order]) == [ranks_of(points)[i] for i in order]


@given(POINTS)
def test_only_the_order_of_scores_and_costs_matters(points: list[tuple[float, float]]) -> None:
    scores, costs = (sorted({p[i] for p in points}) for i in (0, 1))
    assert ranks_of(points) == ranks_of([(3.0 * scores.index(s), 0.5 * costs.index(c)) for s, c in points])


def test_equal_costs_leave_the_order_of_the_scores(step: Step, rollout: Make) -> None:
    batch = [rollout(score, steps=[step()], cost=0.3) for score in (3.0, 1.0, 2.0)]
    as_grpo = advantages(Grpo(), batch)
    assert advantages(Pareto(), batch) == pytest.approx(as_grpo)
    assert advantages(Pareto(), batch[:1]) == [0.0]
    assert advantages(Pareto(), [batch[0]] * 7) == [0.0] * 7


def test_permuting_other_groups_changes_nothing(step: Step, rollout: Make) -> None:
    mine = [rollout(s, "a", [step()], cost=c) for s, c in [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]]
    others = [rollout(s, "b", [step()], cost=c) for s, c in [(9.0, 0.0), (0.0, 9.0), (4.0, 4.0)]]
    alone = advantages(Pareto(), mine)
    assert advantages(Pareto(), mine + others)[:3] == alone
    assert advantages(Pareto(), others[::-1] + mine)[3:] == alone
    interleaved = [each for pair in zip(mine, others, strict=True) for each in pair]
    assert advantages(Pareto(), interleaved)[::2] == alone


def test_equal_scores_are_kept_for_their_costs(step: Step, rollout: Make) -> None:
    assert Pareto().learns_from_equal_scores(0.0)
    batch = Pareto()([rollout(1.0, steps=[step()], cost=cost) for cost in (0.0, 1.0)])
    assert batch.rollouts[0].steps[0].advantage > 0 > batch.rollouts[1].steps[0].advantage
    assert batch.metrics == {"pareto/frac_first": 0.5}


def test_a_reward_that_is_not_finite_is_refused(step: Step, rollout: Make) -> None:
    broken = rollout(1.0, steps=[step()], ref=[[float("nan")]])
    object.__setattr__(broken, "kl_coef", 0.1)
    with pytest.raises(CreditError, match="score 1 is not a finite number"):
        Pareto()([rollout(1.0, steps=[step()]), broken])


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_cost_that_is_not_finite_is_refused(step: Step, rollout: Make, cost: float) -> None:
    batch = [rollout(1.0, steps=[step()], cost=each) for each in (0.0, cost)]
    for estimator in (Pareto(), Hdpo()):
        with pytest.raises(CreditError, match="cost 1 is not a finite number"):
            estimator(batch)
