"""What each step earned, as flat arrays: base rewards, the final score where it belongs, penalties. Before any return.

The final score and the steps' own rewards are two tellings of the same story; `terminal_score` says which counts:

    auto     the score is added at the last step of every rollout of a group in which any step lacks a base reward;
             where every step of the group has one, the score is taken to be told by them already
    always   it is added everywhere          never   nowhere

A missing base reward counts as `default_step_reward`. `invalid_action_penalty` is taken off the reward of a step
whose `step_info["is_action_valid"]` is false.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints, check_choice, codes_of
from toolwise.types import AnnotatedRollout, StepData

TerminalScore = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Episodes:
    """Rollouts as arrays: one entry a rollout, and their steps' rewards end to end."""

    scores: Doubles
    groups: Ints
    """One number a rollout, from 0."""
    lengths: Ints
    """Steps a rollout; their sum is the length of `rewards`."""
    rewards: Doubles

    @property
    def of_step(self) -> Ints:
        """The rollout each step belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def less(self, costs: Doubles) -> Episodes:
        """Each step's reward less its cost, and each score less those of all its steps."""
        of_rollout = np.bincount(self.of_step, costs, len(self.lengths))
        return Episodes(self.scores - of_rollout, self.groups, self.lengths, self.rewards - costs)


def place_scores(
    base: Doubles, scores: Doubles, lengths: Ints, groups: Ints, how: TerminalScore, default_step_reward: float = 0.0
) -> Doubles:
    """Rewards of all steps: `base`, in which nan is a missing one, with the scores added where `how` wants them."""
    check_choice("terminal_score", how, get_args(TerminalScore))
    missing = np.isnan(base)
    rewards = np.where(missing, default_step_reward, base)
    if how == "never" or len(base) == 0:
        return rewards
    added = lengths > 0
    if how == "auto":
        lacking = np.bincount(np.repeat(groups, lengths), missing, minlength=int(groups.max()) + 1) > 0
        added &= lacking[groups]
    rewards[np.cumsum(lengths)[added] - 1] += scores[added]
    return rewards


def episodes_of(
    batch_of_steps: Sequence[Sequence[StepData]],
    scores: Sequence[float],
    group_ids: Sequence[Any],
    *,
    terminal_score: TerminalScore = "auto",
    default_step_reward: float = 0.0,
    invalid_action_penalty: float = 0.0,
) -> Episodes:
    """Arrays from steps."""
    if not len(batch_of_steps) == len(scores) == len(group_ids):
        raise CreditError(
            f"{len(batch_of_steps)} rollouts, {len(scores)} final scores and {len(group_ids)} group ids; "
            "give one score and one group id for each rollout"
        )
    steps = [step for rollout in batch_of_steps for step in rollout]
    final = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(final).all():
        raise CreditError(f"final score of rollout {_first(~np.isfinite(final))} is not a finite number; leave it out")
    base = np.array([step.base_reward for step in steps], dtype=np.float64)  # None becomes nan
    lengths = np.array([len(rollout) for rollout in batch_of_steps], dtype=np.intp)
    groups = codes_of(group_ids)
    odd = [steps[i] for i in np.flatnonzero(~np.isfinite(base)).tolist() if steps[i].base_reward is not None]
    if odd:
        step = odd[0]
        raise CreditError(f"base_reward of step {step.system_step_index} is {step.base_reward}; give a finite number")
    rewards = place_scores(base, final, lengths, groups, terminal_score, default_step_reward)
    if invalid_action_penalty:
        invalid = np.array([not step.step_info.get("is_action_valid", True) for step in steps], dtype=bool)
        rewards[invalid] -= invalid_action_penalty
    return Episodes(final, groups, lengths, rewards)


def episodes_of_rollouts(rollouts: Sequence[AnnotatedRollout], **settings: Any) -> Episodes:
    """The same from the loop's rollouts."""
    return episodes_of(
        [r.scored.steps for r in rollouts],
        [r.scored.score for r in rollouts],
        [r.scored.rollout.group_id for r in rollouts],
        **settings,
    )


def _first(where: Any) -> int:
    return int(np.flatnonzero(where)[0])
