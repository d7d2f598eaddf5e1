"""KL penalty in the reward: each sampled token costs β·(log π_old − log π_ref), the k1 estimator.

It wraps the run's advantage estimator. An estimator with a field `kl_coef` charges each token or step itself; for any
other, the total cost of a rollout's tokens is subtracted from its score. β belongs to the learner and may adapt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from toolwise.advantages.assign import credit, learns_from_equal_scores, min_group_size
from toolwise.advantages.token_rewards import token_k1
from toolwise.learner.kl import KlCoefficient
from toolwise.protocols import AdvantageEstimator, Annotation, Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout


@dataclass(frozen=True, slots=True)
class KlRewardEstimator:
    """An advantage estimator with a KL penalty."""

    inner: AdvantageEstimator
    coefficient: KlCoefficient

    @property
    def needs(self) -> frozenset[Annotation]:
        return self.inner.needs | {"ref_logprobs"}

    @property
    def min_group_size(self) -> int:
        return min_group_size(self.inner)

    def learns_from_equal_scores(self, score: float) -> bool:
        return learns_from_equal_scores(self.inner, score)

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return self.credit(rollouts)[0]

    def credit(self, rollouts: Sequence[AnnotatedRollout]) -> tuple[list[CreditedRollout], Metrics]:
        beta = self.coefficient.value
        costs = [_cost(rollout, beta) for rollout in rollouts]
        credited, metrics = credit(with_kl_penalty(self.inner, beta), rollouts)
        return credited, {"kl/cost": float(np.mean(costs)) if costs else 0.0} | metrics


@dataclass(frozen=True, slots=True)
class _ScorePenaltyEstimator:
    """Runs an estimator on scores from which each rollout's total KL cost is subtracted; built for one batch."""

    inner: AdvantageEstimator
    beta: float

    @property
    def needs(self) -> frozenset[Annotation]:
        return self.inner.needs

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return self.credit(rollouts)[0]

    def credit(self, rollouts: Sequence[AnnotatedRollout]) -> tuple[list[CreditedRollout], Metrics]:
        credited, metrics = credit(
            self.inner, [_subtract_cost(rollout, _cost(rollout, self.beta)) for rollout in rollouts]
        )
        # Keep the original scores in the result: only the advantages see the penalty.
        return [replace(result, annotated=rollout) for result, rollout in zip(credited, rollouts, strict=True)], metrics


def with_kl_penalty(estimator: Any, beta: float) -> Any:
    """Set `kl_coef` on the estimator if it has that field; else wrap the estimator it contains, so that the outer one
    still sees the original scores (e.g. to tell which rollouts succeeded); else subtract the cost from the scores."""
    settings = {field.name for field in fields(estimator) if field.init} if is_dataclass(estimator) else set()
    if "kl_coef" in settings:
        return replace(estimator, kl_coef=beta)
    for name in ("trajectory", "inner"):
        if name in settings and callable(getattr(estimator, name)):
            return replace(estimator, **{name: with_kl_penalty(getattr(estimator, name), beta)})
    return _ScorePenaltyEstimator(estimator, beta)


def _cost(rollout: AnnotatedRollout, beta: float) -> float:
    return beta * float(sum(part.sum() for part in token_k1(rollout)))


def _subtract_cost(rollout: AnnotatedRollout, cost: float) -> AnnotatedRollout:
    scored = rollout.scored
    result = scored.result.model_copy(update={"score": scored.score - cost})
    return replace(rollout, scored=replace(scored, result=result))
