"""The reward of each step as flat arrays: step rewards, the final score, then penalties. Returns are computed later.

`score` is the value of a whole rollout, including its step rewards; `terminal_score` defines how both are used:

    remainder   the last step gets score − Σ base_reward: a rollout's rewards add up to exactly its score, and step
                rewards only say when it was earned. The remainder is 0 if the steps already add up to the score
    add         the last step gets the whole score, for a score that does not contain the step rewards. A rollout's
                total is score + Σ base_reward, also for estimators over whole rollouts
    never       the rewards are the step rewards alone; whole rollouts are still compared by their scores

Σ includes only base rewards that are set. Later adjustments change the total by the same amount: a missing base reward
counts as `default_step_reward`; `invalid_action_penalty` is subtracted from steps whose
`step_info["is_action_valid"]` is false; then come the costs of thinking and of KL (`costs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints, check_choice, integer_codes
from toolwise.advantages.costs import kl_cost, kl_step_costs, thinking_costs
from toolwise.protocols import AdvantageEstimator
from toolwise.types import AnnotatedRollout, RewardSettings, ScoredRollout, StepData, TerminalScore

REMAINDER_TOLERANCE = 1e-12
"""A remainder this small relative to its rewards is rounding error and counts as 0."""


class BuiltinEstimator(RewardSettings, AdvantageEstimator):
    """Base of the built-in estimators: its reward settings are fields of the estimator."""

    @property
    def rewards(self) -> RewardSettings:
        return self


@dataclass(frozen=True, slots=True)
class Episodes:
    """Rollouts as arrays: one entry per rollout, and the concatenated rewards of their steps."""

    scores: Doubles
    """Total of each rollout: its score, adjusted by `terminal_score`, defaults and penalties."""
    groups: Ints
    """Group code of each rollout, from 0."""
    lengths: Ints
    """Steps per rollout; their sum is the length of `rewards`."""
    rewards: Doubles

    @property
    def rollout_of_step(self) -> Ints:
        """Rollout index of each step."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def minus_costs(self, costs: Doubles) -> Episodes:
        """Subtracts each step's cost from its reward and from its rollout's score."""
        rollout_costs = np.bincount(self.rollout_of_step, costs, len(self.lengths))
        return Episodes(self.scores - rollout_costs, self.groups, self.lengths, self.rewards - costs)


def add_terminal_scores(
    base: Doubles, scores: Doubles, lengths: Ints, mode: TerminalScore, default_step_reward: float = 0.0
) -> tuple[Doubles, Doubles]:
    """The rewards of all steps and the totals of all rollouts. In `base`, NaN marks a missing reward."""
    check_choice("terminal_score", mode, get_args(TerminalScore))
    count, rollout_of_step = len(lengths), np.repeat(np.arange(len(lengths)), lengths)
    missing = np.isnan(base)
    known = np.where(missing, 0.0, base)
    sums = np.bincount(rollout_of_step, known, count)
    rewards = np.where(missing, default_step_reward, base)
    nonempty = lengths > 0
    last = np.cumsum(lengths)[nonempty] - 1
    if mode == "remainder":
        remainder = scores - sums
        remainder[
            np.abs(remainder)
            <= REMAINDER_TOLERANCE * (np.abs(scores) + np.bincount(rollout_of_step, np.abs(known), count))
        ] = 0.0
        rewards[last] += remainder[nonempty]
    elif mode == "add":
        rewards[last] += scores[nonempty]
    totals = scores + sums if mode == "add" else scores
    return rewards, totals + default_step_reward * np.bincount(rollout_of_step, missing, count)


def episodes_of(
    batch_of_steps: Sequence[Sequence[StepData]],
    scores: Sequence[float | None],
    group_ids: Sequence[Any],
    *,
    terminal_score: TerminalScore = "remainder",
    default_step_reward: float = 0.0,
    invalid_action_penalty: float = 0.0,
) -> Episodes:
    """Builds the arrays from steps. A score of None is the sum of the rollout's step rewards."""
    if not len(batch_of_steps) == len(scores) == len(group_ids):
        raise CreditError(
            f"{len(batch_of_steps)} rollouts, {len(scores)} final scores and {len(group_ids)} group ids; "
            "give one score and one group id for each rollout"
        )
    steps = [step for rollout in batch_of_steps for step in rollout]
    filled = [_sum_base_rewards(rollout) if s is None else s for rollout, s in zip(batch_of_steps, scores, strict=True)]
    final = np.array(filled, dtype=np.float64)
    if not np.isfinite(final).all():
        first = int(np.flatnonzero(~np.isfinite(final))[0])
        raise CreditError(f"final score of rollout {first} is not a finite number; leave it out")
    base = np.array([step.base_reward for step in steps], dtype=np.float64)  # None becomes NaN
    lengths = np.array([len(rollout) for rollout in batch_of_steps], dtype=np.intp)
    groups = integer_codes(group_ids)
    invalid_steps = [steps[i] for i in np.flatnonzero(~np.isfinite(base)).tolist() if steps[i].base_reward is not None]
    if invalid_steps:
        step = invalid_steps[0]
        raise CreditError(f"base_reward of step {step.system_step_index} is {step.base_reward}; give a finite number")
    rewards, totals = add_terminal_scores(base, final, lengths, terminal_score, default_step_reward)
    episodes = Episodes(totals, groups, lengths, rewards)
    if invalid_action_penalty:
        invalid = np.array([not step.step_info.get("is_action_valid", True) for step in steps], dtype=np.float64)
        episodes = episodes.minus_costs(invalid_action_penalty * invalid)
    return episodes


def total_rewards(rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings) -> Doubles:
    """Total reward of each rollout minus its costs, for estimators over whole rollouts."""
    totals = totals_before_costs([r.scored for r in rollouts], rewards)
    thinking = np.array([0.0 if r.thinking is None else sum(r.thinking.step_costs) for r in rollouts])
    return np.asarray(totals - thinking - np.array([kl_cost(r) for r in rollouts]))


def episodes_from_rollouts(
    rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings, *, kl: bool = True
) -> Episodes:
    """Rewards of steps and totals of rollouts minus their costs (without KL if not `kl`)."""
    episodes = episodes_before_costs([r.scored for r in rollouts], rewards)
    for costs in (thinking_costs(rollouts), kl_step_costs(rollouts) if kl else None):
        episodes = episodes if costs is None else episodes.minus_costs(costs)
    return episodes


def episodes_before_costs(scored: Sequence[ScoredRollout], rewards: RewardSettings) -> Episodes:
    """`episodes_of` for scored rollouts."""
    return episodes_of(
        [s.steps for s in scored],
        [s.score for s in scored],
        [s.rollout.group_id for s in scored],
        terminal_score=rewards.terminal_score,
        default_step_reward=rewards.default_step_reward,
        invalid_action_penalty=rewards.invalid_action_penalty,
    )


def totals_before_costs(scored: Sequence[ScoredRollout], rewards: RewardSettings | None) -> Doubles:
    """Total reward of each rollout; without settings, its score."""
    if rewards is not None and (
        rewards.terminal_score == "add" or rewards.default_step_reward or rewards.invalid_action_penalty
    ):
        return episodes_before_costs(scored, rewards).scores
    return np.array([s.score for s in scored], dtype=np.float64)  # step rewards do not matter here


def _sum_base_rewards(steps: Sequence[StepData]) -> float:
    """NaN if no base reward is set."""
    rewards = [step.base_reward for step in steps if step.base_reward is not None]
    return float(sum(rewards)) if rewards else float("nan")
