"""What an update of the actor minimises, token by token, and the figures it reports of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolwise.learner import distributed
from toolwise.learner.actor_settings import ActorSettings
from toolwise.learner.batch import Batch
from toolwise.learner.kl import kl_loss
from toolwise.learner.losses import clipped_policy_loss, importance_weights
from toolwise.protocols import Metrics


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One entry a token, of one micro-batch."""

    policy: Tensor
    total: Tensor
    """Policy loss, entropy bonus and KL together: what is weighed and minimised."""
    figures: dict[str, Tensor]


def policy_loss_terms(
    settings: ActorSettings, kl_coef: float, batch: Batch, places: Tensor, logprobs: Tensor, entropy: Tensor
) -> LossTerms:
    """`places` are those of the tokens in the batch's columns; `logprobs` and `entropy` are the model's of now."""
    drawn = old = batch.rollout_logprobs[places]
    again = settings.old_logprobs == "recompute"
    if again:
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[places]
    policy, clipped = clipped_policy_loss(
        logprobs,
        old,
        batch.advantages[places],
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    figures = {"entropy": entropy.detach(), "clip_frac": clipped.float(), "kl": old - logprobs.detach()}
    if again:
        weight = importance_weights(old, drawn, settings.importance_cap)
        policy, figures["importance_weight"] = policy * weight, weight
    total = policy
    if settings.entropy_coef:
        total = total - settings.entropy_coef * entropy
    if settings.kl == "loss" and batch.ref_logprobs is not None:
        total = total + kl_coef * kl_loss(settings.kl_estimator, logprobs, batch.ref_logprobs[places])
    return LossTerms(policy, total, figures)


class MetricSums:
    """Figures of the micro-batches of one step, added up where they were computed: reading one waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[str, Tensor] = {}
        self._computed = 0

    def add(self, terms: LossTerms, weights: Tensor, computed: int) -> None:
        here = {name: value.double().sum() for name, value in terms.figures.items()}
        here["loss"] = (terms.policy.detach() * weights).double().sum()
        self._held = {name: self._held[name] + value if self._held else value for name, value in here.items()}
        self._computed += computed

    def means(self, settings: ActorSettings, tokens: int) -> Metrics:
        """Over the tokens of all processes. A process without rows must ask for the same names as the others."""
        names = ["loss", "entropy", "clip_frac", "kl"]
        names += ["importance_weight"] if settings.old_logprobs == "recompute" else []
        held = torch.stack([self._held[name] for name in names]).tolist() if self._held else [0.0] * len(names)
        *sum_over_ranks, computed, count = distributed.sum_over_ranks(
            [*held, float(self._computed), float(tokens)], self.device
        )
        found = dict(zip(names, sum_over_ranks, strict=True))
        loss = found.pop("loss")  # weighed already
        return {"loss": loss, "computed_tokens": computed} | {n: value / max(count, 1.0) for n, value in found.items()}
