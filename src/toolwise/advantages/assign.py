"""From numbers to credited rollouts: the last stretch of every estimator, and how the loop calls one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints
from toolwise.protocols import AdvantageEstimator, MeasuredEstimator, Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout, StepData


def credit(
    estimator: AdvantageEstimator, rollouts: Sequence[AnnotatedRollout]
) -> tuple[list[CreditedRollout], Metrics]:
    """Credit, and what the estimator has to report beside it, where it does."""
    if isinstance(estimator, MeasuredEstimator):
        return estimator.credit(rollouts)
    return estimator(rollouts), {}


def sampled_tokens(step: StepData) -> int:
    """How many tokens the policy sampled in this step; 0 where it gave none."""
    return len((step.policy_logprobs or {}).get("token_ids", ()))


def with_advantage(step: StepData, advantage: float, return_to_go: float | None) -> StepData:
    """A copy of `step`; nothing in it was changed, so nothing need be checked again."""
    return type(step).unchecked(**{**step.__dict__, "advantage": advantage, "return_to_go": return_to_go})


def credit_rollout(rollout: AnnotatedRollout, advantage: float) -> CreditedRollout:
    """The same advantage for every step and every sampled token."""
    steps = rollout.scored.steps
    return CreditedRollout(
        rollout,
        tuple(with_advantage(step, advantage, step.return_to_go) for step in steps),
        tuple(np.full(sampled_tokens(step), advantage, dtype=np.float32) for step in steps),
    )


def credit_steps(rollouts: Sequence[AnnotatedRollout], advantages: Doubles, returns: Doubles) -> list[CreditedRollout]:
    """One advantage and return for each step, rollout after rollout; a step's sampled tokens all get its advantage."""
    values, sums = iter(advantages.tolist()), iter(returns.tolist())
    credited = []
    for rollout in rollouts:
        steps = tuple(with_advantage(step, next(values), next(sums)) for step in rollout.scored.steps)
        tokens = tuple(np.full(sampled_tokens(step), step.advantage, dtype=np.float32) for step in steps)
        credited.append(CreditedRollout(rollout, steps, tokens))
    return credited


def credit_tokens(
    rollouts: Sequence[AnnotatedRollout], counts: Ints, advantages: Doubles, returns: Doubles
) -> list[CreditedRollout]:
    """One advantage and return for each sampled token; `counts` says how many each step has, rollout after rollout.

    A step's own advantage is the mean of its tokens', its return that of its first; 0 where it has no tokens.
    """
    ends = np.cumsum(counts)[:-1] if len(counts) else counts
    by_step = iter(zip(np.split(advantages, ends), np.split(returns, ends), strict=True))
    credited = []
    for rollout in rollouts:
        parts = [next(by_step) for _ in rollout.scored.steps]
        steps = tuple(
            with_advantage(step, float(a.mean()) if len(a) else 0.0, float(r[0]) if len(r) else 0.0)
            for step, (a, r) in zip(rollout.scored.steps, parts, strict=True)
        )
        tokens, sums = (tuple(part[i].astype(np.float32) for part in parts) for i in (0, 1))
        credited.append(CreditedRollout(rollout, steps, tokens, sums))
    return credited


def min_group_size(estimator: AdvantageEstimator) -> int:
    """How many rollouts of one task it needs to say anything."""
    return int(getattr(estimator, "min_group_size", 2))


def learns_from_equal_scores(estimator: AdvantageEstimator, score: float) -> bool:
    """Whether a group whose scores are all `score` may still have something to learn from. An estimator says it for all
    scores, or has a function of the score."""
    told = getattr(estimator, "learns_from_equal_scores", False)
    return bool(told(score) if callable(told) else told)
