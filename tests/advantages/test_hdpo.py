"""HDPO: a hand-worked table, and properties for any rewards and costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages import Grpo, Hdpo
from toolwise.advantages.hdpo import efficiency_advantages
from toolwise.types import AnnotatedRollout, RouterCredit, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]
ROWS = st.lists(
    st.tuples(st.integers(0, 3).map(float), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=24,
)
"""Cost, correctness and group of each rollout."""


def advantages(estimator: Hdpo | Grpo, rollouts: list[AnnotatedRollout]) -> list[float]:
    return [float(rollout.steps[0].advantage or 0.0) for rollout in estimator(rollouts).rollouts]


def test_a_hand_worked_table(step: Step, rollout: Make) -> None:
    # Scores 1, 1, 1, 0: mean 3/4, sample variance (3/16 + 9/16) / 3 = 1/4, so A_acc = 1/2, 1/2, 1/2, −3/2.
    # Costs 0, 1, 2 of the correct ones: mean 1, sample std 1, so A_eff = 1, 0, −1; the wrong one's cost does not count.
    rows = [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0), (0.0, 7.0)]
    batch = [rollout(score, steps=[step()], cost=cost) for score, cost in rows]
    expected = [0.5 + 0.2, 0.5, 0.5 - 0.2, -1.5]
    assert advantages(Hdpo(efficiency_w=0.2), batch) == pytest.approx(expected, abs=1e-5)


def test_the_cost_is_the_routers_where_it_knows_one(step: Step, rollout: Make) -> None:
    batch = [rollout(1.0, steps=[step()], cost=cost) for cost in (0.0, 1.0)]
    dear = RouterCredit(True, True, False, cost=5.0)
    first = replace(batch[0], scored=replace(batch[0].scored, router=dear))
    cheap_last = advantages(Hdpo(efficiency_w=1.0), [first, batch[1]])
    assert cheap_last == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)


def test_a_single_correct_rollout_has_nothing_to_be_cheaper_than(step: Step, rollout: Make) -> None:
    batch = [rollout(score, steps=[step()], cost=cost) for score, cost in [(1.0, 3.0), (0.0, 0.0), (0.0, 1.0)]]
    assert advantages(Hdpo(), batch) == advantages(Grpo(), batch)


def test_the_correct_metric_decides_before_the_score(step: Step, rollout: Make) -> None:
    # A score with a price in it is below 1 for a correct answer.
    rows = [(0.9, 1.0, 1.0), (0.8, 2.0, 1.0), (0.8, 0.0, 0.0)]
    batch = [rollout(score, steps=[step()], cost=cost, metrics={"correct": right}) for score, cost, right in rows]
    gain = np.subtract(advantages(Hdpo(efficiency_w=1.0), batch), advantages(Grpo(), batch))
    assert gain.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0], abs=1e-5)


def test_the_threshold_says_which_scores_are_correct(step: Step, rollout: Make) -> None:
    batch = [rollout(score, steps=[step()], cost=cost) for score, cost in [(0.5, 0.0), (0.5, 1.0), (0.0, 0.0)]]
    assert advantages(Hdpo(), batch) == advantages(Grpo(), batch)
    cheap, dear, wrong = advantages(Hdpo(correct_threshold=0.5), batch)
    assert cheap > dear > wrong


def test_without_its_weight_it_is_grpo(step: Step, rollout: Make) -> None:
    batch = [rollout(score, steps=[step()], cost=cost) for score, cost in [(1.0, 0.0), (1.0, 2.0), (0.2, 1.0)]]
    assert advantages(Hdpo(efficiency_w=0.0), batch) == advantages(Grpo(), batch)


def test_equal_scores_are_kept_for_their_costs(step: Step, rollout: Make) -> None:
    assert Hdpo().learns_from_equal_scores(1.0)
    assert not Hdpo(efficiency_w=0.0).learns_from_equal_scores(1.0)
    cheap, dear = advantages(Hdpo(), [rollout(1.0, steps=[step()], cost=cost) for cost in (0.0, 1.0)])
    assert cheap == -dear > 0


def test_it_says_how_many_were_correct_and_compared(step: Step, rollout: Make) -> None:
    batch = [
        rollout(score, steps=[step()], cost=cost) for score, cost in [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 9.0)]
    ]
    assert Hdpo()(batch).metrics == {"hdpo/frac_correct": 0.5, "hdpo/frac_efficiency": 0.5}


def test_equal_costs_are_exactly_zero() -> None:
    assert efficiency_advantages(np.full(7, 0.1), [True] * 7, ["g"] * 7).tolist() == [0.0] * 7


@given(ROWS)
def test_wrong_rollouts_and_groups_of_one_are_exactly_zero(rows: list[tuple[float, bool, int]]) -> None:
    costs, correct, groups = (list(column) for column in zip(*rows, strict=True))
    found = efficiency_advantages(np.array(costs), correct, groups)
    for value, right, group in zip(found, correct, groups, strict=True):
        compared = sum(r and g == group for r, g in zip(correct, groups, strict=True))
        assert value == 0.0 or (right and compared > 1)


@given(ROWS, st.randoms(use_true_random=False))
def test_permuting_other_groups_changes_nothing(rows: list[tuple[float, bool, int]], rng: Random) -> None:
    mine = [row for row in rows if row[2] == rows[0][2]]
    others = [row for row in rows if row[2] != rows[0][2]]
    rng.shuffle(others)

    def of(chosen: list[tuple[float, bool, int]]) -> list[float]:
        costs, correct, groups = (list(column) for column in zip(*chosen, strict=True))
        return efficiency_advantages(np.array(costs), correct, groups).tolist()

    assert of(mine + others)[: len(mine)] == of(mine)


@given(ROWS)
def test_a_cheaper_correct_rollout_is_never_worse(rows: list[tuple[float, bool, int]]) -> None:
    costs, correct, groups = (list(column) for column in zip(*rows, strict=True))
    found = efficiency_advantages(np.array(costs), correct, groups)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            if a[1] and b[1] and a[2] == b[2] and a[0] < b[0]:
                assert found[i] > found[j]


@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e-6, 1e-9])
def test_the_unit_of_cost_does_not_matter(unit: float) -> None:
    found = efficiency_advantages(np.array([0.0, 1.0, 2.0]) * unit, [True] * 3, [0] * 3)
    assert found.tolist() == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)
