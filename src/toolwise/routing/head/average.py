"""The head that is saved: the mean of the router's weights, and of λ, over the last updates of a run.

Reward and cost pull against each other, so the head of a single step oscillates around the budget, the more so the
closer λ is to the value of a call. The averaged head spends the mean of what these heads spend.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from toolwise.routing.head.head import RouterHead


class HeadAverage:
    """Running mean of heads and of their λ; empty until the first head is added."""

    def __init__(self) -> None:
        self.head: RouterHead | None = None
        self.multipliers: list[float] = []
        self.count = 0

    @torch.no_grad()
    def add(self, head: RouterHead, multipliers: Sequence[float]) -> None:
        self.count += 1
        if self.head is None:
            self.head, self.multipliers = copy.deepcopy(head), [float(multiplier) for multiplier in multipliers]
            return
        for mean, weight in zip(self.head.parameters(), head.parameters(), strict=True):
            mean.lerp_(weight, 1.0 / self.count)
        pairs = zip(self.multipliers, multipliers, strict=True)
        self.multipliers = [mean + (multiplier - mean) / self.count for mean, multiplier in pairs]

    def of(self, head: RouterHead, multipliers: Sequence[float]) -> tuple[RouterHead, Sequence[float]]:
        """The means if there are any, else the arguments."""
        return (head, multipliers) if self.head is None else (self.head, self.multipliers)

    def reset(self) -> None:
        self.head, self.multipliers, self.count = None, [], 0

    def state_dict(self) -> dict[str, Any]:
        if self.head is None:
            return {}
        return {"head": dict(self.head.named_parameters()), "multipliers": self.multipliers, "count": self.count}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], like: RouterHead) -> None:
        """`like` is a head with the same settings."""
        self.reset()
        if state:
            self.head = copy.deepcopy(like)
            for name, weight in self.head.named_parameters():
                weight.copy_(state["head"][name])
            self.multipliers, self.count = list(state["multipliers"]), int(state["count"])
