"""Pareto rank: a rollout is better the fewer layers of its group dominate it in score and cost.

    i dominates j   if r_i ≥ r_j and c_i ≤ c_j, one of them strictly
    rank 1          the rollouts that none dominates; rank 2: those that none dominates once rank 1 is removed; …
    A_i           = (mean(rank) − rank_i) / (std(rank) + ε)        over the rollouts of one group

Paper: ParetoPO, Li et al. 2026, arXiv 2606.16111: its second stage, which starts from a policy that a weighted sum of
score and cost has trained. No weight between score and cost is needed, and only their order within the group matters.

c is the rollout's cost (`ScoredRollout.cost`, by `[router]` if it has prices, else by the tools' own), r its total
reward as in `grpo.py`.

Assumptions: the policy already solves the task cheaply now and then. A wrong answer for nothing and a right one for a
call do not dominate each other, so such a pair teaches nothing until a right answer for nothing or a wrong one for a
call is beside it. Rollouts of one group must differ in cost: use it without a router.

Shapes: one advantage per rollout, for all its sampled tokens. Grouping: by `group_id`. A group of one, or of which none
dominates another, gives exactly 0. Equal rollouts have equal ranks. Where all costs are equal, it is GRPO over the
ranks of the rewards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints, center, check_finite, group_scale, integer_codes, normalize
from toolwise.advantages.assign import credit_rollout
from toolwise.advantages.parts import attach_parts
from toolwise.advantages.step_rewards import BuiltinEstimator, call_costs, total_rewards
from toolwise.types import AnnotatedRollout, CreditedBatch


def pareto_ranks(scores: Doubles, costs: Doubles) -> Ints:
    """Rank of each point, from 1: high scores and low costs are better. O(n log n).

    In order of falling score, then rising cost, a point is dominated exactly by the layers that already contain a cost
    no higher than its own. The lowest costs of the layers increase, so the first other layer is found by bisection.
    """
    ranks = np.zeros(len(scores), dtype=np.intp)
    lowest: list[float] = []
    previous, rank = None, 0
    for index in np.lexsort((costs, -scores)).tolist():
        point = float(scores[index]), float(costs[index])
        if point != previous:  # equal points do not dominate each other
            previous, layer = point, bisect_right(lowest, point[1])
            lowest[layer : layer + 1] = [point[1]]
            rank = layer + 1
        ranks[index] = rank
    return ranks


@dataclass(frozen=True)
class Pareto(BuiltinEstimator):
    """Pareto rank: `adv_estimator = "pareto"`."""

    def learns_from_equal_scores(self, score: float) -> bool:
        """Rollouts of equal score may still differ in what they cost."""
        return True

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        groups = integer_codes([rollout.scored.rollout.group_id for rollout in rollouts])
        scores, costs = total_rewards(rollouts, self.rewards), call_costs(rollouts)
        check_finite(scores)
        ranks = np.zeros(len(rollouts))
        for group in range(int(groups.max(initial=-1)) + 1):
            members = groups == group
            ranks[members] = pareto_ranks(scores[members], costs[members])
        first = np.count_nonzero(ranks == 1) / max(1, len(rollouts))
        credited = list(map(credit_rollout, rollouts, normalize(-ranks, groups).tolist()))
        if credited:
            parts, factors = (
                {"trajectory": center(-ranks, groups)},
                {"group_scale": group_scale(-ranks, groups)[groups]},
            )
            credited = attach_parts(credited, parts, factors, per="rollout")
        return CreditedBatch(credited, {"pareto/frac_first": first})
