"""What the router's head is pulled by: sums over a batch, to be divided by how much there is of it.

drawn       −Σ log π(a_i|x_i)·A_i                routes that were drawn from π itself
expected    −Σ_x Σ_a π(a|x)·A(x,a)               routes stratified over all actions: π weighs, not the counts
entropy     −Σ_x H(π(·|x))                       keeps every route tried
label       −Σ log π(label|x)                    where a row has one
value       Σ (Q̂(x,a) − r)² + Σ (ĉ(x,a) − c)²    the second mode
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_LABEL = -1


def sampled_loss(
    logits: Tensor, row_index: Tensor, actions: Tensor, advantages: Tensor, old_logprobs: Tensor, *, clip: float | None
) -> Tensor:
    """`row_index` [N] names the row of `logits` that drew each of the N actions. With `clip`, PPO's: what has already
    moved
    so far from the old log-prob pulls no further."""
    logprobs = logits.log_softmax(-1)[row_index, actions]
    if clip is None:
        return -(logprobs * advantages).sum()
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages).sum()


def expected_loss(
    logits: Tensor, advantages: Tensor, has_advantage: Tensor, old_logprobs: Tensor, *, clip: float | None
) -> Tensor:
    """All of [B, routes]; a route of which nothing is known is not `has_advantage` and pulls at nothing."""
    probs = logits.softmax(-1)
    # Not a product with 0: what stands in an absent place may not be a number.
    known = torch.where(has_advantage, advantages, 0.0)
    if clip is None:
        return -(probs * known).sum()
    old = old_logprobs.exp()
    bounded = torch.minimum(torch.maximum(probs, old * (1.0 - clip)), old * (1.0 + clip))
    return -torch.minimum(probs * known, bounded * known).sum()


def entropies(logits: Tensor) -> Tensor:
    """[B] in nats."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Rows whose label is `NO_LABEL` (none, or MIXED) count for nothing."""
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")


def value_loss(found: Tensor, row_index: Tensor, actions: Tensor, targets: Tensor) -> Tensor:
    """`found` [B, routes, 1 + units], `targets` [N, 1 + units]: the reward and the costs that came."""
    return (found[row_index, actions] - targets).square().sum()


def calibration_error(predictions: Tensor, outcomes: Tensor, *, bins: int = 10) -> float:
    """How far what came lies from what was foreseen, on average over bins of equally many: 0 is perfect.

    Within a bin errors cancel, so that it is the forecasts that are judged and not the luck of single rollouts.
    """
    if not len(predictions):
        return 0.0
    order = predictions.argsort(stable=True)
    gaps = [
        float((predictions[part] - outcomes[part]).mean().abs()) * len(part)
        for part in order.tensor_split(min(bins, len(order)))
    ]
    return sum(gaps) / len(order)
