"""The reward of each step as flat arrays: step rewards, the final score, then penalties. Returns are computed later.

`score` is the value of a whole rollout, including its step rewards; `terminal_score` defines how both are used:

    remainder   the last step gets score − Σ base_reward: a rollout's rewards add up to exactly its score, and step
                rewards only say when it was earned. The remainder is 0 if the steps already add up to the score
    add         the last step gets the whole score, for a score that does not contain the step rewards. A rollout's
                total is score + Σ base_reward, also for estimators over whole rollouts
    never       the rewards are the step rewards alone; whole rollouts are still compared by their scores

Σ includes only base rewards that are set. Later adjustments change the total by the same amount: a missing base reward
counts as `default_step_reward`; `invalid_action_penalty` is subtracted from steps whose
`step_info["is_action_valid"]` is false; then come the costs of KL (`gigpo.py`, `token_rewards.py`) and of thinking
(`thinking_cost.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints, check_choice, integer_codes
from toolwise.types import AnnotatedRollout, ScoredRollout, StepData

TerminalScore = Literal["remainder", "add", "never"]
REWARD_SETTINGS = ("terminal_score", "default_step_reward", "invalid_action_penalty")
"""The fields of `RewardSettings`."""
REMAINDER_TOLERANCE = 1e-12
"""A remainder this small relative to its rewards is rounding error and counts as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """How an estimator uses step rewards; the base of the built-in ones."""

    terminal_score: TerminalScore = "remainder"
    default_step_reward: float = 0.0
    invalid_action_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_choice("terminal_score", self.terminal_score, get_args(TerminalScore))


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


def episodes_from_rollouts(rollouts: Sequence[AnnotatedRollout], **settings: Any) -> Episodes:
    """`episodes_of` for annotated rollouts."""
    return _episodes([r.scored for r in rollouts], settings)


def total_rewards(scored: Sequence[ScoredRollout], **settings: Any) -> Doubles:
    """Total reward of each rollout, for estimators over whole rollouts; `settings` are those of `episodes_of`."""
    if settings.get("terminal_score") == "add" or any(settings.get(name) for name in REWARD_SETTINGS[1:]):
        return _episodes(scored, settings).scores
    return np.array([s.score for s in scored], dtype=np.float64)  # step rewards do not matter here


def _episodes(scored: Sequence[ScoredRollout], settings: dict[str, Any]) -> Episodes:
    return episodes_of(
        [s.steps for s in scored], [s.score for s in scored], [s.rollout.group_id for s in scored], **settings
    )


def reward_settings(estimator: Any) -> dict[str, Any]:
    """The `RewardSettings` of an estimator, or of the one it wraps; empty for other kinds of estimator."""
    inner = innermost_estimator(estimator)
    return {name: getattr(inner, name) for name in REWARD_SETTINGS if hasattr(inner, name)}


def innermost_estimator(estimator: Any) -> Any:
    """The estimator inside wrappers such as a KL cost or thinking levels."""
    for name in ("inner", "trajectory"):
        if hasattr(estimator, name):
            return innermost_estimator(getattr(estimator, name))
    return estimator


def _sum_base_rewards(steps: Sequence[StepData]) -> float:
    """NaN if no base reward is set."""
    rewards = [step.base_reward for step in steps if step.base_reward is not None]
    return float(sum(rewards)) if rewards else float("nan")
