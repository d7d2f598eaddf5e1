"""How an estimator uses the score and the step rewards: a line that a run logs at startup, and a check of the data.

The first batches show whether the score contains the step rewards, as `terminal_score = "remainder"` assumes.

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

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints, integer_codes
from toolwise.protocols import AdvantageEstimator
from toolwise.types import ScoredRollout

_ROLLOUT_REWARDS = {
    "remainder": "the score of each rollout; step rewards are not used",
    "add": "score + step rewards of each rollout",
    "never": "the score of each rollout; step rewards are not used",
}
_STEP_REWARDS = {
    "remainder": (
        "score on the last step, step rewards at each step; the last step gets the score minus the step rewards, so "
        "that a rollout's total is its score"
    ),
    "add": (
        "score on the last step, step rewards at each step; the whole score is added, so that a rollout's total is "
        "score + step rewards"
    ),
    "never": "step rewards at each step only: the score is not part of the returns",
}
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


def describe_rewards(name: str, estimator: AdvantageEstimator) -> str:
    """The line for the estimator configured as `name`."""
    rewards = estimator.rewards
    if rewards is None:
        return f"advantages: {name} (step rewards and score as the estimator itself uses them)"
    mode = rewards.terminal_score
    parts = [(_STEP_REWARDS if estimator.uses_step_rewards else _ROLLOUT_REWARDS)[mode]]
    if mode == "never" and estimator.uses_step_rewards and estimator.min_group_size > 1:
        parts[0] += " and is only compared between whole rollouts"
    if rewards.default_step_reward:
        parts.append(f"a step without a reward counts as {rewards.default_step_reward:g}")
    if rewards.invalid_action_penalty:
        parts.append(f"an invalid action costs {rewards.invalid_action_penalty:g}")
    return f'advantages: {name} sees {"; ".join(parts)} (algorithm.terminal_score = "{mode}")'


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
        mode = estimator.rewards and estimator.rewards.terminal_score
        return ScoreCheck() if mode == "remainder" and estimator.uses_step_rewards else None

    def observe(self, scored: Sequence[ScoredRollout]) -> str | None:
        """Returns a warning for the user, at most once per run."""
        valid = [s for s in scored if s.result.has_valid_score]
        step_rewards = [[step.base_reward for step in s.steps if step.base_reward is not None] for s in valid]
        if self._done or not any(step_rewards):
            return None
        sums = np.array([float(sum(rewards)) for rewards in step_rewards])
        groups = integer_codes([s.rollout.group_id for s in valid])
        self._batches.append((np.array([s.score for s in valid]), sums, groups))
        cause = _contradiction(self._batches)
        self._done = cause is not None or len(self._batches) == MAX_BATCHES
        if cause is None:
            return None
        return (
            f'algorithm.terminal_score is "remainder", for a score that contains the step rewards, but here {cause}: '
            "the last step would cancel the step rewards; if the score does not contain them, set "
            'algorithm.terminal_score = "add"'
        )


def _evidence(score: Doubles, total: Doubles, equal: float, rounding: float) -> Doubles:
    """From the rollouts of one task: pairs against, pairs in favour, deviations from the mean, and the sums of score²,
    r², B² and score · B, all centered. Step rewards that differ by less than `rounding` may not show in the score."""
    r = score - total
    first, second = np.triu_indices(len(score), 1)
    differ = np.abs(total[first] - total[second]) > max(equal, rounding)
    if not differ.any():
        return np.zeros(7)
    against = (differ & (np.abs(score[first] - score[second]) <= equal)).sum()
    in_favour = (differ & (np.abs(r[first] - r[second]) <= max(equal, rounding))).sum()
    s, r, b = (x - x.mean() for x in (score, r, total))
    return np.array([against, in_favour, len(score) - 1, s @ s, r @ r, b @ b, s @ b])


def _contradiction(batches: Sequence[tuple[Doubles, Doubles, Ints]]) -> str | None:
    scores = np.concatenate([scores for scores, _, _ in batches])
    rounding = _rounding(scores)
    evidence = np.zeros(7)
    for score, total, groups in batches:
        equal = EQUAL_TOLERANCE * max(float(np.abs(score).max()), float(np.abs(total).max()))
        for group in range(int(groups.max()) + 1):
            evidence += _evidence(score[groups == group], total[groups == group], equal, rounding)
    against, in_favour, deviations, ss, rr, bb, sb = evidence.tolist()
    if against >= (MIN_ROUNDED_PAIRS if rounding else MIN_PAIRS) and against > 2 * in_favour:
        return "rollouts of one task have the same score but different step rewards"
    varies = rr > MIN_SPREAD_RATIO**2 * ss > 0.0 and sb * sb < MAX_SQUARED_CORRELATION * ss * bb
    if varies and deviations >= MIN_DEVIATIONS:
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
