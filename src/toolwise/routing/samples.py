"""What crosses between a router and the head that it asks: plain numbers, so that no tensor leaves the learner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from toolwise.protocols import Metrics, Stateful


@dataclass(frozen=True, slots=True)
class RoutePrediction:
    """The head's word on one prompt."""

    logprobs: tuple[float, ...]
    """Of each route."""
    head_inputs: Any = None
    """What the head wants back with the lesson: the prompt, and its features where they will not change."""
    rewards: tuple[float, ...] | None = None
    """value: what each route is foreseen to earn"""
    costs: tuple[tuple[float, ...], ...] | None = None
    """value: and to cost, in each unit"""

    @property
    def probs(self) -> tuple[float, ...]:
        return tuple(math.exp(x) for x in self.logprobs)

    def sample(self, rng: Random) -> int:
        """A route, by chance."""
        return rng.choices(range(len(self.logprobs)), self.probs)[0]

    def argmax(self) -> int:
        """The likeliest route; of equals the first, which costs the least."""
        return max(range(len(self.logprobs)), key=self.logprobs.__getitem__)


@dataclass(frozen=True, slots=True)
class RouteSample:
    """One rollout, as the router sees it."""

    route: int
    reward: float
    """r_task"""
    costs: tuple[float, ...]
    """In each unit that is budgeted."""
    advantage: float = 0.0
    """Of a route that was drawn from the policy."""


@dataclass(frozen=True, slots=True)
class RouterExample:
    """One prompt with all that came of it."""

    prediction: RoutePrediction
    samples: tuple[RouteSample, ...]
    advantages: tuple[float | None, ...] | None = None
    """Of every route, where they were stratified; None where nothing is known of one."""
    label: int | None = None
    """The route that somebody says is right."""


class RouterModel(Stateful, Protocol):
    """The head and what is under it."""

    def predict(
        self, prompts: Sequence[Sequence[int]], multipliers: Sequence[float], *, averaged: bool = False
    ) -> list[RoutePrediction]:
        """Each prompt through the trunk once, whatever many rollouts it begins. `averaged`: by the head that will be
        kept, where that is not the one that learns."""
        ...

    def learn(self, examples: Sequence[RouterExample], multipliers: Sequence[float]) -> Metrics: ...

    def supervised_step(self, predictions: Sequence[RoutePrediction], labels: Sequence[int]) -> Metrics:
        """One supervised step, before anything was tried."""
        ...

    def save(self, folder: Any, metadata: dict[str, Any]) -> None:
        """The head beside a model's weights."""
        ...

    def load(self, folder: Any) -> dict[str, Any]:
        """The head that lies there in the place of one's own; gives the facts that were saved with it."""
        ...
