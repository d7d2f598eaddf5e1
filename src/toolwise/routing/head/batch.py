"""Lessons as tensors: what the router's loss is computed from."""

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
    """Lessons as tensors."""

    examples: Sequence[RouterExample]
    old_logprobs: Tensor
    """[B, routes]"""
    labels: Tensor
    """[B]"""
    advantages: Tensor | None
    """[B, routes] of stratified routes"""
    has_advantage: Tensor
    prompt_index: Tensor
    """[N] the lesson that each rollout is of"""
    actions: Tensor
    sampled_advantages: Tensor
    targets: Tensor
    """[N, 1 + units]"""

    @classmethod
    def of(cls, examples: Sequence[RouterExample], like: Tensor) -> RouterBatch:
        device, samples = like.device, [(i, t) for i, example in enumerate(examples) for t in example.samples]

        def floats(values: Any) -> Tensor:
            return torch.tensor(values, dtype=like.dtype, device=device)

        def whole(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        old = floats([example.prediction.logprobs for example in examples])
        stratified = bool(examples) and all(example.advantages is not None for example in examples)
        rows = [example.advantages or (None,) * old.shape[1] for example in examples]
        return cls(
            examples=examples,
            old_logprobs=old,
            labels=whole([NO_LABEL if example.label is None else example.label for example in examples]),
            advantages=floats([[0.0 if a is None else a for a in row] for row in rows]) if stratified else None,
            has_advantage=torch.tensor([[a is not None for a in row] for row in rows], device=device),
            prompt_index=whole([i for i, _ in samples]),
            actions=whole([t.route for _, t in samples]),
            sampled_advantages=floats([t.advantage for _, t in samples]),
            targets=floats([[t.reward, *t.costs] for _, t in samples]) if samples else like.new_zeros(0, 1),
        )

    @property
    def predictions(self) -> Tensor:
        """[B, routes, 1 + units]"""
        rows = [
            [[reward, *costs] for reward, costs in zip(w.rewards or (), w.costs or (), strict=True)]
            for w in (example.prediction for example in self.examples)
        ]
        return torch.tensor(rows, dtype=self.targets.dtype, device=self.targets.device)

    def parts(self, size: int) -> Iterator[RouterBatch]:
        if size >= len(self.examples):
            yield self
            return
        for start in range(0, len(self.examples), size):
            yield RouterBatch.of(self.examples[start : start + size], self.old_logprobs)
