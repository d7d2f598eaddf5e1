"""Data between the router and its head: plain numbers, so that no tensor leaves the learner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from toolwise.protocols import Metrics, Stateful


@dataclass(frozen=True, slots=True)
class RoutePrediction:
    """The head's output for one prompt."""

    logprobs: tuple[float, ...]
    """One per route."""
    head_inputs: Any = None
    """Passed back to the head in `learn`: the prompt, and its features if the trunk is frozen."""
    rewards: tuple[float, ...] | None = None
    """value mode: predicted reward of each route"""
    costs: tuple[tuple[float, ...], ...] | None = None
    """value mode: predicted costs of each route, one per unit"""
    logits: tuple[float, ...] | None = None
    """As the head gave them, of routes that do not apply too."""
    applicable: tuple[bool, ...] | None = None
    """Which routes the task can take; the others have a log-prob of −∞. None: all."""

    bin_logits: tuple[tuple[float, ...], ...] | None = None
    """With random budgets: the logits for each of them."""
    bin: int | None = None
    """The budget, among those, that the log-probs are for."""

    @classmethod
    def for_bins(cls, logits: Sequence[Sequence[float]]) -> RoutePrediction:
        """From the logits for each budget; `at` chooses one."""
        return cls((), bin_logits=tuple(tuple(row) for row in logits)).at(0)

    def at(self, budget: int | None) -> RoutePrediction:
        """The prediction for one of the random budgets; itself if there are none."""
        if self.bin_logits is None or budget is None:
            return self
        logits = self.bin_logits[budget]
        highest = max(logits)
        total = highest + math.log(math.fsum(math.exp(x - highest) for x in logits))
        known = replace(self, logprobs=tuple(x - total for x in logits), logits=logits, bin=budget, applicable=None)
        return known.restricted(self.applicable)

    def restricted(self, applicable: tuple[bool, ...] | None) -> RoutePrediction:
        """The prediction for a task that can take these routes only (None: all)."""
        if applicable is None:
            return self
        known = [logprob if applies else -math.inf for logprob, applies in zip(self.logprobs, applicable, strict=True)]
        highest = max(known)
        if highest == -math.inf:  # the head ruled out all of them
            known = [0.0 if applies else -math.inf for applies in applicable]
            highest = 0.0
        total = highest + math.log(math.fsum(math.exp(x - highest) for x in known))
        return replace(self, logprobs=tuple(x - total for x in known), applicable=applicable)

    def applies(self, route: int) -> bool:
        return self.applicable is None or self.applicable[route]

    @property
    def recorded_logits(self) -> tuple[float | None, ...]:
        """For records: the head's logits, or log-probs if it gave none; None for a route that does not apply."""
        mask = self.applicable or (True,) * len(self.logprobs)
        return tuple(x if applies else None for x, applies in zip(self.logits or self.logprobs, mask, strict=True))

    @property
    def probs(self) -> tuple[float, ...]:
        return tuple(math.exp(x) for x in self.logprobs)

    def sample(self, rng: Random) -> int:
        return rng.choices(range(len(self.logprobs)), self.probs)[0]

    def argmax(self) -> int:
        """The most likely route; of equals the first, which is the cheapest."""
        return max(range(len(self.logprobs)), key=self.logprobs.__getitem__)


@dataclass(frozen=True, slots=True)
class RouteSample:
    """One rollout, as input for the router's loss."""

    route: int
    reward: float
    """r_task"""
    costs: tuple[float, ...]
    """One per budgeted unit."""
    advantage: float = 0.0
    """For a route sampled from the policy."""


@dataclass(frozen=True, slots=True)
class RouterExample:
    """One prompt with the results of its rollouts: a training example of the head."""

    prediction: RoutePrediction
    samples: tuple[RouteSample, ...]
    advantages: tuple[float | None, ...] | None = None
    """For stratified routes: one per route, None for a route without a rollout."""
    label: int | None = None
    """The labelled route."""


class RoutePredictor(Protocol):
    """The head and its trunk, for predictions."""

    def predict(
        self, prompts: Sequence[Sequence[int]], multipliers: Sequence[float], *, averaged: bool = False
    ) -> list[RoutePrediction]:
        """One forward pass per prompt, for all its rollouts. `averaged`: use the averaged head that will be saved, if
        there is one, instead of the one being trained."""

    def predict_encoded(
        self, prompt: Sequence[int], features: Any, multipliers: Sequence[float], *, averaged: bool = False
    ) -> RoutePrediction:
        """Like `predict`, of one prompt whose features are known."""

    def load(self, folder: Any) -> dict[str, Any]:
        """Replaces the head with the one in `folder`; returns the metadata saved with it."""

    def prediction_state(self) -> dict[str, Any]:
        """The heads, as plain values and tensors."""

    def at_state(self, state: Mapping[str, Any]) -> RoutePredictor:
        """One with the heads of this `prediction_state`, over the same trunk."""


class RouterModel(RoutePredictor, Stateful, Protocol):
    """The head and its trunk, for training."""

    def learn(self, examples: Sequence[RouterExample], multipliers: Sequence[float]) -> Metrics: ...

    def plan_ahead(self, prompts: Sequence[Sequence[int]]) -> None:
        """`predict` will be asked for these prompts next."""

    def read_ahead(self) -> None:
        """It may begin to read them: the trunk will not change before."""

    def dual_estimates(
        self, limits: Sequence[float], multipliers: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float | None]]:
        """What the policy spends on the last prompts, and the λ that would meet the budgets there (None: none would),
        one per budget; both empty before the first prompt. Only asked with `router.budget_window`."""

    def supervised_step(self, predictions: Sequence[RoutePrediction], labels: Sequence[int]) -> Metrics:
        """One supervised step of the warm start."""

    def save(self, folder: Any, metadata: dict[str, Any]) -> None:
        """Saves the head next to a model's weights."""
