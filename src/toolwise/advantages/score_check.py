"""Does the score contain the step rewards, as `terminal_score = "remainder"` takes it to? A look at the first batches.

With B = Σ base_reward of a rollout, the remainder is r = score − B. Where the score contains B, r is what else was
scored: right or wrong, say. Where it does not, r gives back every price and takes back every step reward. Rollouts of
one task tell the two apart, in one of three ways:

    pairs    with different B: the same score speaks against it (the score does not follow B), the same r speaks for it
    spread   r varies far more than the score, and the score is not simply a function of B
    size     |r| is far larger than the whole range of scores, 0 included

Each is silent where the figures fit both readings. Tasks where everything succeeds at the same price do (the score is
0.95 and r is 1), and so does a fine-grained score beside small prices that it may or may not contain: no warning then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints, codes_of
from toolwise.advantages.description import places_score
from toolwise.advantages.step_rewards import reward_settings
from toolwise.types import ScoredRollout

BATCHES = 5
"""How many batches with step rewards are looked at."""
EQUAL = 1e-6
"""Differences smaller than this share of the largest figure are none."""
PAIRS = 3
"""Pairs against it that are needed; they must also be twice as many as those for it."""
SPREAD, DEVIATIONS, FOLLOWS = 3.0, 16, 0.8
"""How many times the deviation of r must be that of scores, over how many deviations from a group's mean; and the
squared correlation of score and B from which the one may follow the other after all."""
SIZE = 10.0
"""How many times the range of scores |r| must be."""


class ScoreCheck:
    """Evidence over the first batches of a run."""

    def __init__(self) -> None:
        self._batches = 0
        self._against = self._for = self._deviations = 0
        self._low = self._high = self._largest = 0.0
        self._squares = np.zeros(4)
        """Within groups: of score, r and B, and score · B."""

    @staticmethod
    def of(estimator: Any) -> ScoreCheck | None:
        """None where no remainder is put anywhere."""
        remainder = reward_settings(estimator).get("terminal_score") == "remainder"
        return ScoreCheck() if remainder and places_score(estimator) else None

    def look(self, scored: Sequence[ScoredRollout]) -> str | None:
        """What to tell the user after this batch; at most once."""
        counted = [s for s in scored if s.result.counts]
        given = [[step.base_reward for step in s.steps if step.base_reward is not None] for s in counted]
        if self._batches >= BATCHES or not any(given):
            return None
        self._batches += 1
        self._add(
            np.array([s.score for s in counted]),
            np.array([float(sum(rewards)) for rewards in given]),
            codes_of([s.rollout.group_id for s in counted]),
        )
        cause = self._cause()
        if cause is None:
            return None
        self._batches = BATCHES
        return (
            f'algorithm.terminal_score is "remainder", for a score that contains the step rewards, and here {cause}: '
            "the last step then takes back what the steps earned or paid; if the score does not contain them, set "
            'algorithm.terminal_score = "add"'
        )

    def _add(self, scores: Doubles, sums: Doubles, groups: Ints) -> None:
        rest = scores - sums
        self._low, self._high = min(self._low, float(scores.min())), max(self._high, float(scores.max()))
        self._largest = max(self._largest, float(np.abs(rest[sums != 0.0]).max(initial=0.0)))
        equal = EQUAL * max(float(np.abs(scores).max()), float(np.abs(sums).max()))
        for group in range(int(groups.max()) + 1):
            score, total, r = (x[groups == group] for x in (scores, sums, rest))
            first, second = np.triu_indices(len(score), 1)
            differ = np.abs(total[first] - total[second]) > equal
            self._against += int((differ & (np.abs(score[first] - score[second]) <= equal)).sum())
            self._for += int((differ & (np.abs(r[first] - r[second]) <= equal)).sum())
            if differ.any():
                score, r, total = (x - x.mean() for x in (score, r, total))
                self._squares += np.array([score @ score, r @ r, total @ total, score @ total])
                self._deviations += len(score) - 1

    def _cause(self) -> str | None:
        if self._against >= PAIRS and self._against > 2 * self._for:
            return "rollouts of one task have the same score and different step rewards"
        ss, rr, bb, sb = self._squares.tolist()
        if self._deviations >= DEVIATIONS and rr > SPREAD**2 * ss > 0.0 and sb * sb < FOLLOWS * ss * bb:
            return f"step rewards vary {(bb / ss) ** 0.5:.1f} times as much as scores within a task"
        if self._largest > SIZE * (self._high - self._low) > 0.0:
            return (
                f"a score less its step rewards is up to {self._largest:g} away from 0, where scores lie between "
                f"{self._low:g} and {self._high:g}"
            )
        return None
