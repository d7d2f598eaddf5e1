"""Does the score contain the step rewards, as `terminal_score = "remainder"` takes it to? A look at the first batches.

With B = Σ base_reward of a rollout, the remainder is r = score − B. Where the score contains B, r is what else was
scored: right or wrong, say. Where it does not, r gives back every price and takes back every step reward. Rollouts of
one task tell the two apart, in one of three ways:

    pairs    with different B: the same score speaks against it (the score does not follow B), the same r speaks for it
    spread   r varies far more than the score, and the score is not simply a function of B
    size     |r| is far larger than the whole range of scores, 0 included; larger than SIZE where all scores are 0

Scores that lie one unit of their last decimal apart may be rounded to it: pairs whose B differs by less tell nothing.
Whole numbers are taken to be exact, since most of them are right or wrong.

Each way is silent where the figures fit both readings. Tasks where everything succeeds at the same price do (the score
is 0.95 and r is 1), and so does a fine-grained score beside small prices that it may or may not contain: no warning
then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints, integer_codes
from toolwise.advantages.description import has_step_returns
from toolwise.advantages.step_rewards import reward_settings
from toolwise.types import ScoredRollout

MAX_BATCHES = 5
"""How many batches with step rewards are looked at."""
EQUAL_TOLERANCE = 1e-6
"""Differences smaller than this share of the largest figure are none."""
MIN_PAIRS, MIN_ROUNDED_PAIRS = 3, 12
"""Pairs against it that are needed, and of scores that may be rounded, which are the same by chance more often; they
must also be more than twice as many as those for it."""
MIN_SPREAD_RATIO, MIN_DEVIATIONS, MAX_SQUARED_CORRELATION = 3.0, 16, 0.8
"""How many times the deviation of r must be that of scores, over how many deviations from a group's mean; and the
squared correlation of score and B from which the one may follow the other after all."""
MIN_SIZE_RATIO = 10.0
"""How many times the range of scores |r| must be."""
MAX_DECIMALS = 6
"""A score with more of them was not rounded."""


class ScoreCheck:
    """Evidence over the first batches of a run."""

    def __init__(self) -> None:
        self._batches: list[tuple[Doubles, Doubles, Ints]] = []
        """Score, Σ base_reward and group of each rollout; looked at anew with each batch, which may have decimals that
        none before it had."""
        self._done = False

    @staticmethod
    def of(estimator: Any) -> ScoreCheck | None:
        """None where no remainder is put anywhere."""
        remainder = reward_settings(estimator).get("terminal_score") == "remainder"
        return ScoreCheck() if remainder and has_step_returns(estimator) else None

    def observe(self, scored: Sequence[ScoredRollout]) -> str | None:
        """What to tell the user after this batch; at most once."""
        counted = [s for s in scored if s.result.has_valid_score]
        given = [[step.base_reward for step in s.steps if step.base_reward is not None] for s in counted]
        if self._done or not any(given):
            return None
        self._batches.append(
            (
                np.array([s.score for s in counted]),
                np.array([float(sum(rewards)) for rewards in given]),
                integer_codes([s.rollout.group_id for s in counted]),
            )
        )
        cause = _contradiction(self._batches)
        self._done = cause is not None or len(self._batches) == MAX_BATCHES
        if self._done:
            self._batches = []
        if cause is None:
            return None
        return (
            f'algorithm.terminal_score is "remainder", for a score that contains the step rewards, and here {cause}: '
            "the last step then takes back what the steps earned or paid; if the score does not contain them, set "
            'algorithm.terminal_score = "add"'
        )


@dataclass(slots=True)
class _Evidence:
    against: int = 0
    """Pairs of rollouts of one task."""
    in_favour: int = 0
    deviations: int = 0
    squares: Doubles = field(default_factory=lambda: np.zeros(4))
    """Within groups: of score, r and B, and score · B."""

    def add(self, score: Doubles, total: Doubles, equal: float, rounding: float) -> None:
        """The rollouts of one task. Step rewards that differ by less than `rounding` need not show in the score."""
        r = score - total
        first, second = np.triu_indices(len(score), 1)
        differ = np.abs(total[first] - total[second]) > max(equal, rounding)
        self.against += int((differ & (np.abs(score[first] - score[second]) <= equal)).sum())
        self.in_favour += int((differ & (np.abs(r[first] - r[second]) <= max(equal, rounding))).sum())
        if differ.any():
            score, r, total = (x - x.mean() for x in (score, r, total))
            self.squares += np.array([score @ score, r @ r, total @ total, score @ total])
            self.deviations += len(score) - 1


def _contradiction(batches: Sequence[tuple[Doubles, Doubles, Ints]]) -> str | None:
    scores = np.concatenate([scores for scores, _, _ in batches])
    rounding = _rounding(scores)
    seen = _Evidence()
    for score, total, groups in batches:
        equal = EQUAL_TOLERANCE * max(float(np.abs(score).max()), float(np.abs(total).max()))
        for group in range(int(groups.max()) + 1):
            seen.add(score[groups == group], total[groups == group], equal, rounding)
    if seen.against >= (MIN_ROUNDED_PAIRS if rounding else MIN_PAIRS) and seen.against > 2 * seen.in_favour:
        return "rollouts of one task have the same score and different step rewards"
    ss, rr, bb, sb = seen.squares.tolist()
    if (
        seen.deviations >= MIN_DEVIATIONS
        and rr > MIN_SPREAD_RATIO**2 * ss > 0.0
        and sb * sb < MAX_SQUARED_CORRELATION * ss * bb
    ):
        return f"step rewards vary {(bb / ss) ** 0.5:.1f} times as much as scores within a task"
    low, high = min(0.0, float(scores.min())), max(0.0, float(scores.max()))
    largest = max(float(np.abs(score - total)[total != 0.0].max(initial=0.0)) for score, total, _ in batches)
    if largest > MIN_SIZE_RATIO * ((high - low) or 1.0):
        lie = f"scores lie between {low:g} and {high:g}" if high > low else "all scores are 0"
        return f"a score less its step rewards is up to {largest:g} away from 0, where {lie}"
    return None


def _rounding(scores: Doubles) -> float:
    """One unit of the last decimal where scores may have been rounded to it: some are one unit apart, and not all are
    whole numbers. Else 0."""
    levels = np.unique(np.round(scores, MAX_DECIMALS + 1))
    for decimals in range(1, MAX_DECIMALS + 1):
        if (np.abs(levels - np.round(levels, decimals)) < 0.5 * 10.0**-MAX_DECIMALS).all():
            whole = bool((levels == np.round(levels)).all())
            unit = 10.0**-decimals * (1.0 + EQUAL_TOLERANCE)
            return unit if not whole and float(np.diff(levels).min(initial=np.inf)) <= unit else 0.0
    return 0.0
