"""Lessons as tensors: what the router's loss is computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolwise.learner.router_loss import NO_LABEL
from toolwise.routing.lessons import Lesson


@dataclass(frozen=True)
class RouterBatch:
    """Lessons as tensors."""

    lessons: Sequence[Lesson]
    old_logprobs: Tensor
    """[B, routes]"""
    labels: Tensor
    """[B]"""
    advantages: Tensor | None
    """[B, routes] of stratified routes"""
    present: Tensor
    of_prompt: Tensor
    """[N] the lesson that each rollout is of"""
    actions: Tensor
    drawn_advantages: Tensor
    targets: Tensor
    """[N, 1 + units]"""

    @classmethod
    def of(cls, lessons: Sequence[Lesson], like: Tensor) -> RouterBatch:
        device, taken = like.device, [(i, t) for i, lesson in enumerate(lessons) for t in lesson.taken]

        def floats(values: Any) -> Tensor:
            return torch.tensor(values, dtype=like.dtype, device=device)

        def whole(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        old = floats([lesson.weighed.logprobs for lesson in lessons])
        stratified = bool(lessons) and all(lesson.advantages is not None for lesson in lessons)
        rows = [lesson.advantages or (None,) * old.shape[1] for lesson in lessons]
        return cls(
            lessons=lessons,
            old_logprobs=old,
            labels=whole([NO_LABEL if lesson.label is None else lesson.label for lesson in lessons]),
            advantages=floats([[0.0 if a is None else a for a in row] for row in rows]) if stratified else None,
            present=torch.tensor([[a is not None for a in row] for row in rows], device=device),
            of_prompt=whole([i for i, _ in taken]),
            actions=whole([t.route for _, t in taken]),
            drawn_advantages=floats([t.advantage for _, t in taken]),
            targets=floats([[t.reward, *t.costs] for _, t in taken]) if taken else like.new_zeros(0, 1),
        )

    @property
    def foreseen(self) -> Tensor:
        """[B, routes, 1 + units]"""
        rows = [
            [[reward, *costs] for reward, costs in zip(w.rewards or (), w.costs or (), strict=True)]
            for w in (lesson.weighed for lesson in self.lessons)
        ]
        return torch.tensor(rows, dtype=self.targets.dtype, device=self.targets.device)

    def parts(self, size: int) -> Iterator[RouterBatch]:
        if size >= len(self.lessons):
            yield self
            return
        for start in range(0, len(self.lessons), size):
            yield RouterBatch.of(self.lessons[start : start + size], self.old_logprobs)
