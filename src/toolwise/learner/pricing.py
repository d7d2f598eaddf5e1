"""KL in the reward: every sampled token costs β·(log π_old − log π_ref), the estimator k1, before credit is given.

An estimator that has a field `kl_coef` charges each token or each step itself. One over scores sees each rollout's
score less what its tokens cost together. Stands around the run's estimator; β is the learner's, and may move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from toolwise.advantages.credit import credit
from toolwise.advantages.token_rewards import token_k1
from toolwise.learner.kl import KlCoefficient
from toolwise.protocols import AdvantageEstimator, Annotation, Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout


@dataclass(frozen=True, slots=True)
class PricedEstimator:
    """An estimator, and the price of leaving the reference."""

    inner: AdvantageEstimator
    coefficient: KlCoefficient

    @property
    def needs(self) -> frozenset[Annotation]:
        return self.inner.needs | {"ref_logprobs"}

    @property
    def least_group(self) -> int:
        return int(getattr(self.inner, "least_group", 2))

    @property
    def equal_scores_teach(self) -> bool:
        return bool(getattr(self.inner, "equal_scores_teach", False))

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return self.credit(rollouts)[0]

    def credit(self, rollouts: Sequence[AnnotatedRollout]) -> tuple[list[CreditedRollout], Metrics]:
        beta, inner = self.coefficient.value, self.inner
        costs = [beta * float(sum(part.sum() for part in token_k1(rollout))) for rollout in rollouts]
        metrics = {"kl/cost": float(np.mean(costs)) if costs else 0.0}
        finer = charged(inner, beta)
        if finer is not None:
            credited, more = credit(finer, rollouts)
        else:
            credited, more = credit(inner, [_less(r, cost) for r, cost in zip(rollouts, costs, strict=True)])
        # The score stays what the reward said; only credit has seen the price.
        kept = [replace(found, annotated=rollout) for found, rollout in zip(credited, rollouts, strict=True)]
        return kept, metrics | more


def charged(estimator: Any, beta: float) -> AdvantageEstimator | None:
    """The same with a price on each token or step, also where another holds it; None where it sees scores alone."""
    changes: dict[str, Any] = {"kl_coef": beta} if hasattr(estimator, "kl_coef") else {}
    for name in ("trajectory", "inner"):
        held = charged(getattr(estimator, name), beta) if hasattr(estimator, name) else None
        if held is not None:
            changes[name] = held
    return replace(estimator, **changes) if changes else None


def _less(rollout: AnnotatedRollout, cost: float) -> AnnotatedRollout:
    scored = rollout.scored
    result = scored.result.model_copy(update={"score": scored.score - cost})
    return replace(rollout, scored=replace(scored, result=result))
