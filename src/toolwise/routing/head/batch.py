"""The router's training examples as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolwise.routing.head.loss import NO_LABEL
from toolwise.routing.samples import RouterExample


@dataclass(frozen=True)
class RouterBatch:
    """B examples with N rollouts altogether."""

    examples: Sequence[RouterExample]
    old_logprobs: Tensor
    """[B, routes]"""
    labels: Tensor
    """[B]"""
    advantages: Tensor | None
    """[B, routes] for stratified routes"""
    has_advantage: Tensor
    prompt_index: Tensor
    """[N] the example that each rollout belongs to"""
    actions: Tensor
    sampled_advantages: Tensor
    targets: Tensor
    """[N, 1 + units]"""

    @classmethod
    def of(cls, examples: Sequence[RouterExample], like: Tensor) -> RouterBatch:
        device, samples = like.device, [(i, sample) for i, example in enumerate(examples) for sample in example.samples]

        def floats(values: Any) -> Tensor:
            return torch.tensor(values, dtype=like.dtype, device=device)

        def integers(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        old = floats([example.prediction.logprobs for example in examples])
        stratified = bool(examples) and all(example.advantages is not None for example in examples)
        rows = [example.advantages or (None,) * old.shape[1] for example in examples]
        return cls(
            examples=examples,
            old_logprobs=old,
            labels=integers([NO_LABEL if example.label is None else example.label for example in examples]),
            advantages=floats([[0.0 if a is None else a for a in row] for row in rows]) if stratified else None,
            has_advantage=torch.tensor([[a is not None for a in row] for row in rows], device=device),
            prompt_index=integers([i for i, _ in samples]),
            actions=integers([sample.route for _, sample in samples]),
            sampled_advantages=floats([sample.advantage for _, sample in samples]),
            targets=floats([[sample.reward, *sample.costs] for _, sample in samples])
            if samples
            else like.new_zeros(0, 1),
        )

    @property
    def predictions(self) -> Tensor:
        """[B, routes, 1 + units]"""
        rows = [
            [[reward, *costs] for reward, costs in zip(prediction.rewards or (), prediction.costs or (), strict=True)]
            for prediction in (example.prediction for example in self.examples)
        ]
        return torch.tensor(rows, dtype=self.targets.dtype, device=self.targets.device)

    def parts(self, size: int) -> Iterator[RouterBatch]:
        if size >= len(self.examples):
            yield self
            return
        for start in range(0, len(self.examples), size):
            yield RouterBatch.of(self.examples[start : start + size], self.old_logprobs)
