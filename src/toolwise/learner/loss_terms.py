"""The actor's per-token loss (policy loss, entropy bonus, KL) and the metrics reported with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolwise.config.schema import ActorConfig, RunConfig
from toolwise.learner import distributed
from toolwise.learner.batch import Batch
from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.kl import kl_loss
from toolwise.learner.losses import checked_policy_loss, importance_weights
from toolwise.protocols import Metrics, PolicyLoss


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Losses and metrics of one micro-batch, one entry per token."""

    policy: Tensor
    total: Tensor
    """Policy loss, entropy bonus and KL: what is weighted and minimised."""
    metrics: dict[str, Tensor]


def policy_loss_terms(
    config: RunConfig,
    loss: PolicyLoss,
    kl_coef: float,
    batch: Batch,
    columns: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    version: int = 0,
) -> LossTerms:
    """`columns` index the micro-batch's tokens in the batch; `logprobs` and `entropy` are the current model's.
    `version` is the learner's at the start of the update."""
    actor, algorithm = config.actor, config.algorithm
    rollout_logprobs = old = batch.rollout_logprobs[columns]
    recompute, advantages, rows = uses_old_logprobs(actor, loss), batch.advantages[columns], batch.row[columns]
    if recompute:
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[columns]
    if isinstance(loss, Correction):
        sampled = SampledWith(rollout_logprobs, batch.version[columns], version)
        policy, metrics = loss.corrected(logprobs, old, advantages, rows, sampled)
    else:
        policy, metrics = checked_policy_loss(loss, logprobs, old, advantages, rows)
    metrics = {**metrics, "entropy": entropy.detach(), "kl": old - logprobs.detach()}
    if recompute and not isinstance(loss, Correction):
        weight = importance_weights(old, rollout_logprobs, actor.importance_cap)
        policy, metrics["importance_weight"] = policy * weight, weight
    total = policy
    if actor.entropy_coef:
        total = total - actor.entropy_coef * entropy
    if algorithm.kl == "loss" and batch.ref_logprobs is not None:
        total = total + kl_coef * kl_loss(algorithm.kl_estimator, logprobs, batch.ref_logprobs[columns])
    return LossTerms(policy, total, metrics)


def uses_old_logprobs(actor: ActorConfig, loss: PolicyLoss) -> bool:
    """Whether the loss compares with the learner's log-probs at the start of the update, not with the rollout's."""
    return loss.needs_old if isinstance(loss, Correction) else actor.old_logprobs == "recompute"


def metric_names(actor: ActorConfig, loss: PolicyLoss) -> list[str]:
    """The names of `LossTerms.metrics`."""
    recompute = actor.old_logprobs == "recompute" and not isinstance(loss, Correction)
    return ["entropy", *loss.metric_names, "kl", *(["importance_weight"] if recompute else [])]


class MetricSums:
    """Sums the metrics of one step's micro-batches on the device: reading each value would synchronise with it."""

    def __init__(self, device: torch.device, names: Sequence[str]) -> None:
        """`names` are the metrics that every process has, with or without rows."""
        self.device = device
        self._names = ["loss", *names]
        self._sums: dict[str, Tensor] = {}
        self._computed = 0

    def add(self, terms: LossTerms, weights: Tensor, computed: int) -> None:
        sums = {name: value.double().sum() for name, value in terms.metrics.items()}
        sums["loss"] = (terms.policy.detach() * weights).double().sum()
        self._sums = {name: self._sums[name] + value if self._sums else value for name, value in sums.items()}
        self._computed += computed

    def means(self, tokens: int) -> Metrics:
        """Means over the tokens of all processes."""
        names = self._names
        sums = torch.stack([self._sums[name] for name in names]).tolist() if self._sums else [0.0] * len(names)
        *reduced, computed, count = distributed.sum_over_ranks(
            [*sums, float(self._computed), float(tokens)], self.device
        )
        totals = dict(zip(names, reduced, strict=True))
        loss = totals.pop("loss")  # already weighted
        return {"loss": loss, "computed_tokens": computed} | {n: value / max(count, 1.0) for n, value in totals.items()}
