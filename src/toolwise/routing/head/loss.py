"""Losses of the router's head, as sums over a batch; the caller divides by the number of terms.

sampled     −Σ log π(a_i|x_i)·A_i                routes sampled from π
expected    −Σ_x Σ_a π(a|x)·A(x,a)               stratified routes: weighted by π, not by the counts
entropy     −Σ_x H(π(·|x))                       keeps every route explored
label       −Σ log π(label|x)                    rows with a label
value       Σ (Q̂(x,a) − r)² + Σ (ĉ(x,a) − c)²    value mode
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_LABEL = -1


def sampled_loss(
    logits: Tensor, row_index: Tensor, actions: Tensor, advantages: Tensor, old_logprobs: Tensor, *, clip: float | None
) -> Tensor:
    """`row_index` [N] is the row of `logits` that each of the N actions was sampled from; `clip`: PPO's clip ratio."""
    logprobs = logits.log_softmax(-1)[row_index, actions]
    if clip is None:
        return -(logprobs * advantages).sum()
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages).sum()


def expected_loss(
    logits: Tensor, advantages: Tensor, has_advantage: Tensor, old_logprobs: Tensor, *, clip: float | None
) -> Tensor:
    """All inputs are [B, routes]; a route without `has_advantage` contributes no gradient."""
    probs = logits.softmax(-1)
    # Not a product with 0: a missing advantage may be NaN.
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
    """Rows with `NO_LABEL` (no label, or MIXED) are ignored."""
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")


def value_loss(outputs: Tensor, row_index: Tensor, actions: Tensor, targets: Tensor) -> Tensor:
    """`outputs` [B, routes, 1 + units] are predictions, `targets` [N, 1 + units] the actual rewards and costs."""
    return (outputs[row_index, actions] - targets).square().sum()


def calibration_error(predictions: Tensor, outcomes: Tensor, *, bins: int = 10) -> float:
    """Mean absolute gap between predictions and outcomes over equally sized bins of the predictions; 0 is perfect.

    Errors cancel within a bin, so that predictions are judged and not the noise of single rollouts.
    """
    if not len(predictions):
        return 0.0
    order = predictions.argsort(stable=True)
    gaps = [
        float((predictions[part] - outcomes[part]).mean().abs()) * len(part)
        for part in order.tensor_split(min(bins, len(order)))
    ]
    return sum(gaps) / len(order)
