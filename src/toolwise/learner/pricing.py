"""KL in the reward: every sampled token costs β·(log π_old − log π_ref), the estimator k1, before credit is given.

An estimator over token rewards (it has a field `kl_coef`) charges each token. One over scores sees each rollout's score
less what its tokens cost together. Stands around the run's estimator; β is the learner's, and may move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from toolwise.advantages.credit import credit
from toolwise.errors import ToolwiseError
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
        if hasattr(inner, "kl_coef"):
            charged: Any = replace(inner, kl_coef=beta)  # type: ignore[type-var]  # estimators are dataclasses
            credited, more = credit(charged, rollouts)
        else:
            credited, more = credit(inner, [_less(r, cost) for r, cost in zip(rollouts, costs, strict=True)])
        # The score stays what the reward said; only credit has seen the price.
        kept = [replace(found, annotated=rollout) for found, rollout in zip(credited, rollouts, strict=True)]
        return kept, metrics | more


def token_k1(rollout: AnnotatedRollout) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """log π_old − log π_ref of each sampled token, an array a step."""
    name = rollout.scored.rollout.rollout_id
    if rollout.ref_logprobs is None:
        raise ToolwiseError(f"rollout {name} has no reference log-probs: the learner must annotate them")
    drawn = [(step.policy_logprobs or {}).get("logprobs", ()) for step in rollout.scored.steps]
    old = rollout.old_logprobs if rollout.old_logprobs is not None else drawn
    return [
        np.asarray(now, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
        for now, reference in zip(old, rollout.ref_logprobs, strict=True)
    ]


def _less(rollout: AnnotatedRollout, cost: float) -> AnnotatedRollout:
    scored = rollout.scored
    result = scored.result.model_copy(update={"score": scored.score - cost})
    return replace(rollout, scored=replace(scored, result=result))
