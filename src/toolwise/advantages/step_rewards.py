"""The reward of each step, as flat arrays: step rewards, the final score, then penalties. Returns come later.

`score` is what a whole rollout was worth, its step rewards included; `terminal_score` says how both are used:

    remainder   the last step gets score − Σ base_reward: the rewards of a rollout add up to exactly its score, and step
                rewards only say when it was earned. Steps that add up to the score already leave 0
    add         the last step gets the whole score: for a score that does not contain the step rewards. A rollout's
                total is score + Σ base_reward, for estimators that look at whole rollouts as well
    never       the rewards are the step rewards alone; whole rollouts are still compared by their scores

Only given base rewards count in Σ. What else changes a reward comes afterwards, and changes the total as much: a
missing base reward counts as `default_step_reward`; `invalid_action_penalty` is taken off a step whose
`step_info["is_action_valid"]` is false; then the prices of KL (`gigpo.py`, `token_rewards.py`) and of thinking
(`priced.py`).
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
"""The fields by which every estimator of the table says what it makes of step rewards."""
REMAINDER_TOLERANCE = 1e-12
"""A remainder this small beside the rewards it is made of is what rounding left of 0."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """Rollouts as arrays: one entry a rollout, and their steps' rewards end to end."""

    scores: Doubles
    """What a rollout earned in all: its score, with what `terminal_score`, defaults and penalties add to it."""
    groups: Ints
    """One number a rollout, from 0."""
    lengths: Ints
    """Steps a rollout; their sum is the length of `rewards`."""
    rewards: Doubles

    @property
    def rollout_of_step(self) -> Ints:
        """The rollout each step belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def minus_costs(self, costs: Doubles) -> Episodes:
        """Each step's reward less its cost, and each score less those of all its steps."""
        of_rollout = np.bincount(self.rollout_of_step, costs, len(self.lengths))
        return Episodes(self.scores - of_rollout, self.groups, self.lengths, self.rewards - costs)


def add_terminal_scores(
    base: Doubles, scores: Doubles, lengths: Ints, how: TerminalScore, default_step_reward: float = 0.0
) -> tuple[Doubles, Doubles]:
    """The rewards of all steps and the totals of all rollouts. In `base`, nan marks a missing reward."""
    check_choice("terminal_score", how, get_args(TerminalScore))
    count, rollout_of_step = len(lengths), np.repeat(np.arange(len(lengths)), lengths)
    missing = np.isnan(base)
    given = np.where(missing, 0.0, base)
    earned = np.bincount(rollout_of_step, given, count)
    rewards = np.where(missing, default_step_reward, base)
    some = lengths > 0
    last = np.cumsum(lengths)[some] - 1
    if how == "remainder":
        rest = scores - earned
        rest[
            np.abs(rest) <= REMAINDER_TOLERANCE * (np.abs(scores) + np.bincount(rollout_of_step, np.abs(given), count))
        ] = 0.0
        rewards[last] += rest[some]
    elif how == "add":
        rewards[last] += scores[some]
    totals = scores + earned if how == "add" else scores
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
    """Arrays from steps. A score of None is the sum of the rollout's step rewards."""
    if not len(batch_of_steps) == len(scores) == len(group_ids):
        raise CreditError(
            f"{len(batch_of_steps)} rollouts, {len(scores)} final scores and {len(group_ids)} group ids; "
            "give one score and one group id for each rollout"
        )
    steps = [step for rollout in batch_of_steps for step in rollout]
    whole = [_sum_base_rewards(rollout) if s is None else s for rollout, s in zip(batch_of_steps, scores, strict=True)]
    final = np.array(whole, dtype=np.float64)
    if not np.isfinite(final).all():
        raise CreditError(
            f"final score of rollout {_first_index(~np.isfinite(final))} is not a finite number; leave it out"
        )
    base = np.array([step.base_reward for step in steps], dtype=np.float64)  # None becomes nan
    lengths = np.array([len(rollout) for rollout in batch_of_steps], dtype=np.intp)
    groups = integer_codes(group_ids)
    odd = [steps[i] for i in np.flatnonzero(~np.isfinite(base)).tolist() if steps[i].base_reward is not None]
    if odd:
        step = odd[0]
        raise CreditError(f"base_reward of step {step.system_step_index} is {step.base_reward}; give a finite number")
    rewards, totals = add_terminal_scores(base, final, lengths, terminal_score, default_step_reward)
    episodes = Episodes(totals, groups, lengths, rewards)
    if invalid_action_penalty:
        invalid = np.array([not step.step_info.get("is_action_valid", True) for step in steps], dtype=np.float64)
        episodes = episodes.minus_costs(invalid_action_penalty * invalid)
    return episodes


def episodes_from_rollouts(rollouts: Sequence[AnnotatedRollout], **settings: Any) -> Episodes:
    """The same from the loop's rollouts."""
    return _episodes([r.scored for r in rollouts], settings)


def total_rewards(scored: Sequence[ScoredRollout], **settings: Any) -> Doubles:
    """What each rollout earned in all, for whoever compares whole rollouts; `settings` are those of `episodes_of`."""
    if settings.get("terminal_score") == "add" or any(settings.get(name) for name in REWARD_SETTINGS[1:]):
        return _episodes(scored, settings).scores
    return np.array([s.score for s in scored], dtype=np.float64)  # whatever the steps hold


def _episodes(scored: Sequence[ScoredRollout], settings: dict[str, Any]) -> Episodes:
    return episodes_of(
        [s.steps for s in scored], [s.score for s in scored], [s.rollout.group_id for s in scored], **settings
    )


def reward_settings(estimator: Any) -> dict[str, Any]:
    """The `REWARD_SETTINGS` of an estimator, or of the one inside it; none where it is of another kind."""
    held = innermost_estimator(estimator)
    return {name: getattr(held, name) for name in REWARD_SETTINGS if hasattr(held, name)}


def innermost_estimator(estimator: Any) -> Any:
    """The innermost estimator, without what stands around it: a price of KL, thinking levels."""
    for name in ("inner", "trajectory"):
        if hasattr(estimator, name):
            return innermost_estimator(getattr(estimator, name))
    return estimator


def _sum_base_rewards(steps: Sequence[StepData]) -> float:
    """nan where there is nothing to sum up."""
    given = [step.base_reward for step in steps if step.base_reward is not None]
    return float(sum(given)) if given else float("nan")


def _first_index(where: Any) -> int:
    return int(np.flatnonzero(where)[0])
