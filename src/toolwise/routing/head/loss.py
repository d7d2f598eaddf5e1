"""The router's training examples as tensors, and the losses of its head, as sums over a batch; the caller divides.

sampled     −Σ log π(a_i|x_i)·A_i                routes sampled from π
expected    −Σ_x Σ_a π(a|x)·A(x,a)               stratified routes: weighted by π, not by the counts
entropy     −Σ_x H(π(·|x))                       keeps every route explored
label       −Σ log π(label|x)                    rows with a label
value       Σ (Q̂(x,a) − r)² + Σ (ĉ(x,a) − c)²    value mode
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolwise.routing.samples import RouterExample

NO_LABEL = -1
MASKED = -1e9
"""Logit of a route that does not apply: finite, so that its probability and its gradient are 0 and never NaN."""


class RouterBatch:
    """B examples with N rollouts altogether."""

    def __init__(self, examples: Sequence[RouterExample], like: Tensor) -> None:
        samples = [(i, sample) for i, example in enumerate(examples) for sample in example.samples]

        def floats(values: Any) -> Tensor:
            return torch.tensor(values, dtype=like.dtype, device=like.device)

        def integers(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=like.device)

        self.examples = examples
        bins = [example.prediction.bin for example in examples]
        self.bins = integers(bins) if any(b is not None for b in bins) else None
        """[B] the random budget of each example, if they have one."""
        # [B, routes], and [B] for the labels; advantages only for stratified routes.
        self.old_logprobs = floats([example.prediction.logprobs for example in examples])
        self.labels = integers([NO_LABEL if example.label is None else example.label for example in examples])
        self.labelled = sum(example.label is not None for example in examples)
        masks = [example.prediction.applicable for example in examples]
        self.mask = None
        """[B, routes] whether a route applies; None: all do."""
        if any(mask is not None for mask in masks):
            every = (True,) * self.old_logprobs.shape[1]
            self.mask = torch.tensor([mask or every for mask in masks], device=like.device)
        stratified = bool(examples) and all(example.advantages is not None for example in examples)
        rows = [example.advantages or (None,) * self.old_logprobs.shape[1] for example in examples]
        self.advantages = floats([[0.0 if a is None else a for a in row] for row in rows]) if stratified else None
        self.has_advantage = torch.tensor([[a is not None for a in row] for row in rows], device=like.device)
        # [N]: the example that each rollout belongs to, its route and advantage; targets are [N, 1 + units].
        self.prompt_index = integers([i for i, _ in samples])
        self.actions = integers([sample.route for _, sample in samples])
        self.sampled_advantages = floats([sample.advantage for _, sample in samples])
        targets = [[sample.reward, *sample.costs] for _, sample in samples]
        self.targets = floats(targets) if samples else like.new_zeros(0, 1)

    @property
    def predictions(self) -> Tensor:
        """[B, routes, 1 + units]"""
        rows = [
            [[reward, *costs] for reward, costs in zip(prediction.rewards or (), prediction.costs or (), strict=True)]
            for prediction in (example.prediction for example in self.examples)
        ]
        return torch.tensor(rows, dtype=self.targets.dtype, device=self.targets.device)

    def of_bins(self, outputs: Tensor) -> Tensor:
        """The head's outputs [B, bins, routes] for the budget of each example; others unchanged."""
        return outputs if self.bins is None else outputs[torch.arange(len(self.bins), device=outputs.device), self.bins]

    def masked(self, logits: Tensor) -> Tensor:
        """Logits [B, routes] with those of routes that do not apply at `MASKED`."""
        return logits if self.mask is None else logits.masked_fill(~self.mask, MASKED)

    def parts(self, size: int) -> list[RouterBatch]:
        if size >= len(self.examples):
            return [self]
        starts = range(0, len(self.examples), size)
        return [RouterBatch(self.examples[start : start + size], self.old_logprobs) for start in starts]


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
