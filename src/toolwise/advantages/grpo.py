"""GRPO and RLOO: compare each rollout with the other rollouts of the same task.

    A_i = (r_i − mean(r)) / (std(r) + ε)       GRPO: over the rollouts of one group, sample std, ε = 1e-6
    A_i = r_i − mean(r)                        Dr. GRPO: norm_by_std = False
    A_i = r_i − mean(r of the others)          RLOO: leave one out

Papers: GRPO, Shao et al. 2024 (arXiv 2402.03300); Dr. GRPO (arXiv 2503.20783); RLOO, Ahmadian et al. 2024 (arXiv
2402.14740).

r is the rollout's score; with `terminal_score = "add"`, the score plus its step rewards (`step_rewards.py`); minus its
costs. To normalize several rewards separately before summing them, see `rewards/combine.py`, which runs earlier.

Shapes: one score and one advantage per rollout; every sampled token of rollout i gets A_i, regardless of their number.
Grouping: rollouts by `group_id`, never tokens or steps. A group of one, or of equal rewards, gives exactly 0.
Statistics are float64, and nothing outside a group can change its advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolwise.advantages.arrays import (
    EPSILON,
    Array,
    CreditError,
    Doubles,
    Ints,
    Normalization,
    TokenMask,
    center,
    check_finite,
    copy_array,
    group_scale,
    integer_codes,
    normalize,
)
from toolwise.advantages.assign import credit_rollout
from toolwise.advantages.parts import attach_parts
from toolwise.advantages.step_rewards import BuiltinEstimator, reward_parts, total_rewards
from toolwise.types import AnnotatedRollout, CreditedBatch


def group_advantages(
    scores: Sequence[float] | Doubles,
    groups: Sequence[Any] | Ints,
    *,
    norm_by_std: bool = True,
    leave_one_out: bool = False,
    epsilon: float = EPSILON,
) -> Doubles:
    """One advantage per score within its group; `leave_one_out` overrides `norm_by_std`."""
    x = np.asarray(scores, dtype=np.float64)
    if len(x) != len(groups):
        raise CreditError(f"{len(x)} scores for {len(groups)} group ids; give one group id for each score")
    check_finite(x)
    return normalize(x, integer_codes(groups), _mode(norm_by_std, leave_one_out), epsilon=epsilon)


def _mode(norm_by_std: bool = True, leave_one_out: bool = False) -> Normalization:
    return "leave_one_out" if leave_one_out else "mean_std_norm" if norm_by_std else "mean_norm"


@dataclass(frozen=True)
class Grpo(BuiltinEstimator):
    """GRPO: `adv_estimator = "grpo"`."""

    norm_by_std: bool = True

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        return _credit_groups(self, rollouts, norm_by_std=self.norm_by_std)


@dataclass(frozen=True)
class Rloo(BuiltinEstimator):
    """RLOO: `adv_estimator = "rloo"`."""

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        return _credit_groups(self, rollouts, leave_one_out=True)


def _credit_groups(estimator: Grpo | Rloo, rollouts: Sequence[AnnotatedRollout], **form: bool) -> CreditedBatch:
    groups = integer_codes([rollout.scored.rollout.group_id for rollout in rollouts])
    totals = total_rewards(rollouts, estimator.rewards)
    advantages = group_advantages(totals, groups, **form).tolist()
    credited = list(map(credit_rollout, rollouts, advantages))
    return CreditedBatch(attach_parts(credited, *group_parts(rollouts, estimator, groups, **form), per="rollout"))


def group_parts(
    rollouts: Sequence[AnnotatedRollout], estimator: BuiltinEstimator, groups: Ints, **form: bool
) -> tuple[dict[str, Doubles], dict[str, Doubles]]:
    """Parts and factors of `group_advantages` over the total rewards, one entry per rollout."""
    if not rollouts:
        return {}, {}
    parts = reward_parts(rollouts, estimator.rewards)
    scale = group_scale(total_rewards(rollouts, estimator.rewards), groups, _mode(**form))[groups]
    return {name: center(values, groups) for name, values in parts.items()}, {"group_scale": scale}


def compute_grpo_outcome_advantage(
    token_level_rewards: Array,
    response_mask: Any,
    index: Any,
    *,
    norm_by_std: bool = True,
    leave_one_out: bool = False,
    epsilon: float = EPSILON,
) -> tuple[Array, Array]:
    """GRPO over arrays or tensors [batch, length]: returns (advantages, returns), equal for outcome rewards.

    A row's score is the sum of its token rewards under the mask, and `index` its group. Zero off the mask.
    """
    mask = TokenMask.of(response_mask, rewards=token_level_rewards)
    if len(index) != len(mask.mask):
        raise CreditError(f"shapes differ: rewards {mask.mask.shape}, index {len(index)}")
    nonempty = mask.nonempty_rows  # a row without tokens is not a sample of its group and must not affect the others
    advantages = np.zeros(len(nonempty))
    advantages[nonempty] = group_advantages(
        mask.row_sums(token_level_rewards)[nonempty],
        integer_codes(index)[nonempty],
        norm_by_std=norm_by_std,
        leave_one_out=leave_one_out,
        epsilon=epsilon,
    )
    spread = mask.spread(advantages, token_level_rewards)
    return spread, copy_array(spread)
