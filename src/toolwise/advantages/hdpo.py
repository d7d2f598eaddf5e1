"""HDPO: GRPO for the score, plus an advantage for low cost that only compares correct rollouts with each other.

    A_i     = A_acc_i + w · A_eff_i
    A_acc_i = (r_i − mean(r)) / (std(r) + ε)        over all rollouts of the group, as in GRPO
    A_eff_i = (mean(c) − c_i) / (std(c) + ε)        over the correct rollouts of the group; 0 for incorrect ones, and
                                                    where fewer than two are correct

Paper: Yan et al. 2026, arXiv 2604.08545. The two parts are normalized apart, so that the spread of the score cannot
drown the cost, and saving is only worth something once the task is solved: a wrong answer gains nothing by being cheap.

c is the rollout's cost (`ScoredRollout.cost`, by `[router]` if it has prices, else by the tools' own). The paper
rewards 1 / (calls + 1) instead, which ranks correct rollouts alike if all calls cost the same; −c also works for
prices. If all of a group are below 1, as in money, they are divided by the highest, so that ε stays negligible. The
paper adds two losses, each with its own ratio clipping; the sum of advantages used here has the same gradient where
nothing is clipped. w is its w_tool, 0.15.

Assumptions: rollouts of one group differ in cost, so use HDPO without a router (with one, the rollouts of a group share
their route). A rollout is correct if the reward's "correct" metric, or else its score, reaches `correct_threshold`.

r is as in `grpo.py`. Shapes: one advantage per rollout, for all its sampled tokens. Grouping: by `group_id`. A group of
one, or of equal rewards and costs, gives exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints, integer_codes, normalize
from toolwise.advantages.assign import credit_rollout
from toolwise.advantages.grpo import group_advantages, group_parts
from toolwise.advantages.parts import attach_parts
from toolwise.advantages.step_rewards import BuiltinEstimator, call_costs, total_rewards
from toolwise.config.algorithm import HdpoOptions
from toolwise.types import AnnotatedRollout, CreditedBatch


def efficiency_advantages(costs: Doubles, correct: Any, groups: Sequence[Any] | Ints) -> Doubles:
    """A_eff of each rollout."""
    chosen = np.flatnonzero(np.asarray(correct, dtype=bool))
    paid, group = np.asarray(costs, dtype=np.float64)[chosen], integer_codes(groups)[chosen]
    highest = np.zeros(int(group.max(initial=-1)) + 1)
    np.maximum.at(highest, group, paid)
    unit = np.where((highest > 0.0) & (highest < 1.0), highest, 1.0)
    advantages = np.zeros(len(costs))
    advantages[chosen] = normalize(-paid / unit[group], group)
    return advantages


@dataclass(frozen=True)
class Hdpo(HdpoOptions, BuiltinEstimator):
    """HDPO: `adv_estimator = "hdpo"`."""

    def __post_init__(self) -> None:
        if not (self.efficiency_w >= 0.0 and np.isfinite(self.efficiency_w)):
            raise CreditError(f"efficiency_w is {self.efficiency_w}; it must be a number of at least 0")
        super().__post_init__()

    def learns_from_equal_scores(self, score: float) -> bool:
        """Correct rollouts may still differ in what they cost; whether they are correct, `score` alone cannot say."""
        return self.efficiency_w > 0.0

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        groups = integer_codes([rollout.scored.rollout.group_id for rollout in rollouts])
        correct = np.array([r.scored.result.correctness >= self.correct_threshold for r in rollouts], dtype=bool)
        efficiency = efficiency_advantages(call_costs(rollouts), correct, groups)
        advantages = group_advantages(total_rewards(rollouts, self.rewards), groups) + self.efficiency_w * efficiency
        count = max(1, len(rollouts))
        metrics = {
            "hdpo/frac_correct": np.count_nonzero(correct) / count,
            "hdpo/frac_efficiency": np.count_nonzero(efficiency) / count,
        }
        parts, factors = group_parts(rollouts, self, groups)
        parts = {name: values * factors["group_scale"] for name, values in parts.items()}
        parts["price"] = parts.get("price", 0.0) + self.efficiency_w * efficiency
        credited = list(map(credit_rollout, rollouts, advantages.tolist()))
        return CreditedBatch(attach_parts(credited, parts, per="rollout"), metrics)
