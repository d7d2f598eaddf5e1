"""GRPO (Shao et al. 2024, arXiv 2402.03300): a rollout is as good as it beats the others of its own task.

    A_i = (r_i − mean(r)) / (std(r) + ε)       over the rollouts of one group, sample std, ε = 1e-6
    A_i = r_i − mean(r)                        with norm_by_std = False (Dr. GRPO, arXiv 2503.20783)
    A_i = r_i − mean(r of the others)          leave one out, RLOO (Ahmadian et al. 2024, arXiv 2402.14740)

r is the rollout's score; with `terminal_score = "add"`, the score and its step rewards (`step_rewards.py`).
Shapes: one score a rollout in, one advantage a rollout out; every sampled token of rollout i gets A_i, however many
there are. Grouping: by `group_id`, over rollouts, never over tokens or steps. A group of one, and a group whose
rewards are all equal, gives exactly 0. Statistics in float64: nothing outside a group can change its advantages.
Several rewards, each normalised in its group before they are summed: `rewards/combine.py`, which comes before credit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np

from toolwise.advantages.arrays import (
    EPSILON,
    CreditError,
    Doubles,
    Ints,
    Normalization,
    check_choice,
    integer_codes,
    normalize,
)
from toolwise.advantages.assign import credit_rollout
from toolwise.advantages.step_rewards import TerminalScore, reward_settings, total_rewards
from toolwise.advantages.tensors import Array, TokenMask, copy_array
from toolwise.protocols import Annotation
from toolwise.types import AnnotatedRollout, CreditedRollout


def group_advantages(
    scores: Sequence[float] | Doubles,
    groups: Sequence[Any],
    *,
    norm_by_std: bool = True,
    leave_one_out: bool = False,
    epsilon: float = EPSILON,
) -> Doubles:
    """One advantage a score, against its group; `leave_one_out` takes the place of both other forms."""
    x = np.asarray(scores, dtype=np.float64)
    if len(x) != len(groups):
        raise CreditError(f"{len(x)} scores for {len(groups)} group ids; give one group id for each score")
    return _normalize_in_groups(x, integer_codes(groups), norm_by_std, leave_one_out, epsilon)


def _normalize_in_groups(
    scores: Doubles, groups: Ints, norm_by_std: bool, leave_one_out: bool, epsilon: float
) -> Doubles:
    if not np.isfinite(scores).all():
        raise CreditError(f"score {int(np.flatnonzero(~np.isfinite(scores))[0])} is not a finite number; leave it out")
    how: Normalization = "mean_std_norm" if norm_by_std else "mean_norm"
    return normalize(scores, groups, "leave_one_out" if leave_one_out else how, epsilon=epsilon)


@dataclass(frozen=True, slots=True)
class Grpo:
    """`adv_estimator = "grpo"`"""

    norm_by_std: bool = True
    terminal_score: TerminalScore = "remainder"
    default_step_reward: float = 0.0
    invalid_action_penalty: float = 0.0

    needs: ClassVar[frozenset[Annotation]] = frozenset()
    min_group_size: ClassVar[int] = 2
    learns_from_equal_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("terminal_score", self.terminal_score, get_args(TerminalScore))

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return _credit_groups(self, rollouts, norm_by_std=self.norm_by_std)


@dataclass(frozen=True, slots=True)
class Rloo:
    """`adv_estimator = "rloo"`"""

    terminal_score: TerminalScore = "remainder"
    default_step_reward: float = 0.0
    invalid_action_penalty: float = 0.0

    needs: ClassVar[frozenset[Annotation]] = frozenset()
    min_group_size: ClassVar[int] = 2
    learns_from_equal_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("terminal_score", self.terminal_score, get_args(TerminalScore))

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return _credit_groups(self, rollouts, leave_one_out=True)


def _credit_groups(estimator: Grpo | Rloo, rollouts: Sequence[AnnotatedRollout], **form: bool) -> list[CreditedRollout]:
    totals = total_rewards([r.scored for r in rollouts], **reward_settings(estimator))
    advantages = group_advantages(totals, [r.scored.rollout.group_id for r in rollouts], **form)
    return [credit_rollout(rollout, a) for rollout, a in zip(rollouts, advantages.tolist(), strict=True)]


def compute_grpo_outcome_advantage(
    token_level_rewards: Array,
    response_mask: Any,
    index: Any,
    *,
    norm_by_std: bool = True,
    leave_one_out: bool = False,
    epsilon: float = EPSILON,
) -> tuple[Array, Array]:
    """The same over arrays or tensors [batch, length]: a row's score is the sum of its token rewards under the mask,
    `index` names its group; gives (advantages, returns), equal for outcome rewards, zero off the mask."""
    where = TokenMask.of(response_mask, rewards=token_level_rewards)
    if len(index) != len(where.mask):
        raise CreditError(f"shapes differ: rewards {where.mask.shape}, index {len(index)}")
    scores, groups = where.row_sums(token_level_rewards), integer_codes(index)
    told = where.nonempty_rows
    if told.all():
        advantages = _normalize_in_groups(scores, groups, norm_by_std, leave_one_out, epsilon)
    else:  # a row without a single token is no sample of its group, and must not move the others
        advantages = np.zeros(len(told))
        advantages[told] = _normalize_in_groups(scores[told], groups[told], norm_by_std, leave_one_out, epsilon)
    spread = where.spread(advantages, token_level_rewards)
    return spread, copy_array(spread)
