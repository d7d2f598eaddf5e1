"""The head that is kept: the mean of the router's weights, and of its λ, over the last updates of a run.

Reward and price pull against each other, so the head of any one step swings about the budget, and the nearer λ is to
what a call is worth the wider; the mean of such heads spends the mean of what they spend.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from toolwise.routing.head.head import RouterHead


class HeadAverage:
    """Nothing until the first head is added."""

    def __init__(self) -> None:
        self.head: RouterHead | None = None
        self.multipliers: list[float] = []
        self.count = 0

    @torch.no_grad()
    def add(self, head: RouterHead, multipliers: Sequence[float]) -> None:
        self.count += 1
        if self.head is None:
            self.head, self.multipliers = copy.deepcopy(head), [float(price) for price in multipliers]
            return
        for mean, weight in zip(self.head.parameters(), head.parameters(), strict=True):
            mean.lerp_(weight, 1.0 / self.count)
        pairs = zip(self.multipliers, multipliers, strict=True)
        self.multipliers = [mean + (price - mean) / self.count for mean, price in pairs]

    def of(self, head: RouterHead, multipliers: Sequence[float]) -> tuple[RouterHead, Sequence[float]]:
        """The means, where there are any; else what is given."""
        return (head, multipliers) if self.head is None else (self.head, self.multipliers)

    def reset(self) -> None:
        self.head, self.multipliers, self.count = None, [], 0

    def state_dict(self) -> dict[str, Any]:
        if self.head is None:
            return {}
        return {"head": dict(self.head.named_parameters()), "multipliers": self.multipliers, "count": self.count}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], like: RouterHead) -> None:
        """`like` is a head of the same settings."""
        self.reset()
        if state:
            self.head = copy.deepcopy(like)
            for name, weight in self.head.named_parameters():
                weight.copy_(state["head"][name])
            self.multipliers, self.count = list(state["multipliers"]), int(state["count"])
