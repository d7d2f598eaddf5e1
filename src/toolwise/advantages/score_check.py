"""Checks in the first batches whether the score contains the step rewards, as `terminal_score = "remainder"` assumes.

With B = Σ base_reward of a rollout, the remainder is r = score − B. If the score contains B, r is what else was scored,
such as correctness. If it does not, r refunds every penalty and takes back every step reward. Rollouts of one task can
tell the two cases apart in three ways:

    pairs    with different B: equal scores are evidence against (the score ignores B), equal r is evidence in favour
    spread   r varies far more than the score, and the score is not simply a function of B
    size     |r| is far larger than the range of scores, including 0 (taken as 1 if all scores are 0)

Scores that differ by one unit of their last decimal may be rounded to it; pairs whose B differs by less are ignored.
Integer scores are assumed to be exact, since most mean right or wrong.

There is no warning if the data fits both cases: for example if every rollout succeeds at the same cost (the score is
0.95 and r is 1), or if a fine-grained score may or may not contain small penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints, integer_codes
from toolwise.protocols import AdvantageEstimator
from toolwise.types import ScoredRollout

MAX_BATCHES = 5
"""The number of batches with step rewards to check."""
EQUAL_TOLERANCE = 1e-6
"""Differences below this fraction of the largest value count as 0."""
MIN_PAIRS, MIN_ROUNDED_PAIRS = 3, 12
"""Pairs of evidence against that are needed for a warning. Possibly rounded scores need more, since they are more often
equal by chance. There must also be more than twice as many as in favour."""
MIN_SPREAD_RATIO, MIN_DEVIATIONS, MAX_SQUARED_CORRELATION = 3.0, 16, 0.8
"""For the spread test: the minimum ratio of the deviations of r and of scores, the minimum number of deviations from a
group mean, and the squared correlation of score and B from which the score may depend on B after all."""
MIN_SIZE_RATIO = 10.0
"""The minimum ratio of |r| to the range of scores."""
MAX_DECIMALS = 6
"""A score with more decimals was not rounded."""


class ScoreCheck:
    """Collects evidence over the first batches of a run."""

    def __init__(self) -> None:
        self._batches: list[tuple[Doubles, Doubles, Ints]] = []
        """Score, Σ base_reward and group of each rollout. All are re-evaluated with each batch, since a new batch may
        have more decimals."""
        self._done = False

    @staticmethod
    def of(estimator: AdvantageEstimator) -> ScoreCheck | None:
        """None if the estimator does not use the remainder."""
        rewards = estimator.rewards
        remainder = rewards is not None and rewards.terminal_score == "remainder"
        return ScoreCheck() if remainder and estimator.uses_step_rewards else None

    def observe(self, scored: Sequence[ScoredRollout]) -> str | None:
        """Returns a warning for the user, at most once per run."""
        valid = [s for s in scored if s.result.has_valid_score]
        step_rewards = [[step.base_reward for step in s.steps if step.base_reward is not None] for s in valid]
        if self._done or not any(step_rewards):
            return None
        self._batches.append(
            (
                np.array([s.score for s in valid]),
                np.array([float(sum(rewards)) for rewards in step_rewards]),
                integer_codes([s.rollout.group_id for s in valid]),
            )
        )
        cause = _contradiction(self._batches)
        self._done = cause is not None or len(self._batches) == MAX_BATCHES
        if self._done:
            self._batches = []
        if cause is None:
            return None
        return (
            f'algorithm.terminal_score is "remainder", for a score that contains the step rewards, but here {cause}: '
            "the last step would cancel the step rewards; if the score does not contain them, set "
            'algorithm.terminal_score = "add"'
        )


@dataclass(slots=True)
class _Evidence:
    against: int = 0
    """Number of pairs of rollouts of one task."""
    in_favour: int = 0
    deviations: int = 0
    squares: Doubles = field(default_factory=lambda: np.zeros(4))
    """Sums within groups: score², r², B² and score · B, all centered."""

    def add(self, score: Doubles, total: Doubles, equal: float, rounding: float) -> None:
        """Adds the rollouts of one task. Step rewards that differ by less than `rounding` may not show in the score."""
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
    evidence = _Evidence()
    for score, total, groups in batches:
        equal = EQUAL_TOLERANCE * max(float(np.abs(score).max()), float(np.abs(total).max()))
        for group in range(int(groups.max()) + 1):
            evidence.add(score[groups == group], total[groups == group], equal, rounding)
    if evidence.against >= (MIN_ROUNDED_PAIRS if rounding else MIN_PAIRS) and evidence.against > 2 * evidence.in_favour:
        return "rollouts of one task have the same score but different step rewards"
    ss, rr, bb, sb = evidence.squares.tolist()
    if (
        evidence.deviations >= MIN_DEVIATIONS
        and rr > MIN_SPREAD_RATIO**2 * ss > 0.0
        and sb * sb < MAX_SQUARED_CORRELATION * ss * bb
    ):
        return f"step rewards vary {(bb / ss) ** 0.5:.1f} times as much as scores within a task"
    low, high = min(0.0, float(scores.min())), max(0.0, float(scores.max()))
    largest = max(float(np.abs(score - total)[total != 0.0].max(initial=0.0)) for score, total, _ in batches)
    if largest > MIN_SIZE_RATIO * ((high - low) or 1.0):
        scale = f"scores range from {low:g} to {high:g}" if high > low else "all scores are 0"
        return f"a score minus its step rewards is up to {largest:g} away from 0, while {scale}"
    return None


def _rounding(scores: Doubles) -> float:
    """One unit of the last decimal if the scores may be rounded to it (some differ by one unit, and not all are
    integers), else 0."""
    levels = np.unique(np.round(scores, MAX_DECIMALS + 1))
    for decimals in range(1, MAX_DECIMALS + 1):
        if (np.abs(levels - np.round(levels, decimals)) < 0.5 * 10.0**-MAX_DECIMALS).all():
            integers = bool((levels == np.round(levels)).all())
            unit = 10.0**-decimals * (1.0 + EQUAL_TOLERANCE)
            return unit if not integers and float(np.diff(levels).min(initial=np.inf)) <= unit else 0.0
    return 0.0
